"""A fully-sharded data-parallel runtime for PyTorch.

Reading order is import order; each file imports only from those below it.

    fully_shard.py        fully_shard, fully_shard_context, microbatch: the entry points
    checkpoint.py         distributed checkpoint save / load; chunk metadata of uneven shards
    full_state.py         full state dicts of rank 0, and safetensors
    optimizer_entries.py  model_entries.py     what a checkpoint has of either, and what must fit
    checkpoint_reader.py  reads its files, and runs nothing that they say
    checkpoint_files.py   its directory: manifest, checksums, the swap
    json_tensors.py       whatever is no tensor, as JSON
    optimizer.py          fully_shard_optimizer: step on local shards, refresh compute weights
    muon.py               orthogonalised optimizer computed by tensor owners
    grad_norm.py          clip_grad_norm_ over sharded, replicated and expert gradients
    plain_optimizer.py    optimizers that were not made sharded: checked at their steps
    grad_scaling.py       torch.amp.GradScaler: what one rank finds, all find
    hooks.py              module and autograd hooks: they call the verbs of unit.py, decide nothing
    meta.py               parameters on the meta device: made real, each module reset once
    module.py             FsdpModule: what fully_shard adds to a module's class
    unit.py               ShardedUnit: what a unit does around its forward and backward
    weights.py            its full weights: gathered, put into the modules, freed
    gradients.py          its gradients: counted as they come, reduced, shown to the optimizer
    context.py            FsdpContext: streams, and the beginning and end of passes
    prefetcher.py         PrefetchOrder: which units are gathered early
    open_units.py         units whose backward is not over
    context_stats.py      what a context has done, in numbers
    module_tree.py        roots, names and both orders, from the trees of modules
    uses.py               which forward calls backward has still to enter
    unit_protocol.py      what a context knows of units
    window.py             the countdown of gradients (pure)
    identity.py           how a unit is called
    execution_order.py    ExecutionEvent, ExecutionOrder: weak, phase-tagged, one cursor (pure)
    agreement.py          what ranks exchange once: recorded passes and owner maps
    parameter_group.py    parameters that travel together, their buffers and representations
    gather_scatter.py     packed point-to-point of owners
    owner_planning.py     owner maps and plans (pure)
    dbuffer.py            DBuffer: flat distributed buffer; placement changes become collectives
    uneven.py             DTensors whose rows lie elsewhere than DTensor's own arithmetic says
    collectives.py        the collectives of one mesh axis, on equal and unequal pieces
    layout_builder.py     packing algorithms (pure)
    layout.py             GlobalLayout, ranges (pure)
    placement.py          RowAtomic, BlockAtomic, TensorAtomic, Placements
    runtime_policy.py  schedule_policy.py  mixed_precision.py     frozen dataclasses
    phase.py              RESTING, FORWARD, BACKWARD
    device.py             streams, events, memory pools, annotations
    torch_private.py      every private PyTorch name that fsdp_core uses, and which versions have it
    errors.py             ConfigError, StateError
"""

import torch

from fsdp_core.checkpoint import load_checkpoint, save_checkpoint
from fsdp_core.context import FsdpContext
from fsdp_core.dbuffer import DBuffer
from fsdp_core.errors import ConfigError, StateError
from fsdp_core.execution_order import ExecutionEvent, ExecutionOrder
from fsdp_core.fully_shard import fully_shard, fully_shard_context, microbatch
from fsdp_core.grad_norm import clip_grad_norm_
from fsdp_core.hooks import register_forward_method
from fsdp_core.mixed_precision import MixedPrecisionPolicy
from fsdp_core.module import FsdpModule
from fsdp_core.muon import FsdpMuon
from fsdp_core.optimizer import fully_shard_optimizer
from fsdp_core.phase import Phase
from fsdp_core.placement import BlockAtomic, Placements, RowAtomic, TensorAtomic
from fsdp_core.prefetcher import PrefetchOrder
from fsdp_core.runtime_policy import RuntimePolicy
from fsdp_core.schedule_policy import SchedulePolicy
from fsdp_core.torch_private import check_torch_version

check_torch_version(torch.__version__)

__all__ = [
    "BlockAtomic",
    "ConfigError",
    "DBuffer",
    "ExecutionEvent",
    "ExecutionOrder",
    "FsdpContext",
    "FsdpModule",
    "FsdpMuon",
    "MixedPrecisionPolicy",
    "Phase",
    "Placements",
    "PrefetchOrder",
    "RowAtomic",
    "RuntimePolicy",
    "SchedulePolicy",
    "StateError",
    "TensorAtomic",
    "clip_grad_norm_",
    "fully_shard",
    "fully_shard_context",
    "fully_shard_optimizer",
    "load_checkpoint",
    "microbatch",
    "register_forward_method",
    "save_checkpoint",
]
