"""Run a distributed PyTorch program on simulated ranks and check every ordering."""
