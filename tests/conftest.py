"""What every test starts with: drawn examples that are the same each time, and one torch thread."""

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("same_each_time", derandomize=True, deadline=None, database=None)
settings.load_profile("same_each_time")
