"""What a training program is made of: frozen, JSON-able records; no torch, nothing runs.

Note [paths]
    A module is named by its path in the tree: ``""`` is the top, ``"0.1"`` the second child of its first
    child. The same path is its name in ``named_modules`` of the model that is built from it.

Note [values]
    Inputs and weights are small integers and every layer ends in a *fold* (``model.py``), so that sums
    of gradients over ranks and microbatches are exact in any order: shards put back together must equal
    the unsharded run bit for bit.
"""

import math
from dataclasses import dataclass
from typing import Literal

from fsdp_sim.program.record import Record

SPEC_VERSION = 4

DType = Literal["float32", "bfloat16", "float16"]
Frozen = Literal["none", "weight", "all"]
LayerKind = Literal["linear", "scale", "rows", "embed"]
Join = Literal["chain", "sum"]
Checkpoint = Literal["none", "reentrant", "non_reentrant"]
Output = Literal[
    "tensor", "tuple", "list", "dict", "nested", "namedtuple", "dataclass", "frozen_dataclass"
]
Strategy = Literal[
    "no_shard", "zero1", "zero2", "zero3", "hsdp", "hfsdp", "zero1_zero2", "tensor_atomic"
]
PassKind = Literal["train", "no_grad", "inference", "enabled"]
Backward = Literal["joint", "each", "each_reversed"]
OptimizerKind = Literal["sgd", "adam", "adamw"]
Implementation = Literal["plain", "foreach", "fused"]


@dataclass(frozen=True, repr=False)
class LayerSpec(Record):
    """A module's own parameters and what it computes with them, on rows of ``width`` elements.

    * ``linear``: weight [width, width]; * ``scale``: weight [width], element-wise;
    * ``rows``: two weights [rows, width], so uneven, tiny and (with 0 rows) empty shards;
    * ``embed``: weight [rows, width], looked up by an index made of the input and added to it.

    Attributes:
        rows: leading size of the weights of ``rows`` and ``embed``; ignored by the others.
        bias: whether there is a bias of [width] elements too.
        bias_dtype: its dtype; None is that of the weight.
        frozen: which of the parameters require no gradient.
        delayed: the weight of a ``linear`` gets its gradient after the backward, from ``backward_dw``.
    """

    kind: LayerKind = "linear"
    rows: int = 1
    bias: bool = False
    dtype: DType = "float32"
    bias_dtype: DType | None = None
    frozen: Frozen = "none"
    delayed: bool = False


@dataclass(frozen=True, repr=False)
class PrecisionSpec(Record):
    """The fields of ``MixedPrecisionPolicy``; None is the parameter's own dtype."""

    main_params: DType | None = "float32"
    main_grads: DType | None = None
    grad_comm: DType | None = None
    compute: DType | None = None


@dataclass(frozen=True, repr=False)
class UnitSpec(Record):
    """How one call of ``fully_shard`` treats a module.

    Attributes:
        group: modules whose units carry the same non-empty name are sharded by one call, with the
            options of the first of them.
        strategy: the placements, by the name of the strategy (``placements.py``).
        axes: the axes of the mesh that it is sharded over, in rising order; None is all. Along the others
            each coordinate has a copy of its own, as experts have (``copies.py``).
        forward_prefetch: elements to gather ahead in forward; None is exactly one unit, 0 none.
        backward_prefetch: the same in backward.
        grad_accumulation_count: declared number of gradients in a window; None is not declared.
        hooks: whether the runtime hooks its modules; else the program gathers and frees it by hand, around
            each call and around each backward.
    """

    strategy: Strategy = "zero3"
    axes: tuple[int, ...] | None = None
    group: str = ""
    precision: PrecisionSpec | None = None
    grad_divisor: int = 1
    forward_prefetch: int | None = None
    backward_prefetch: int | None = None
    reshard_after_forward: bool = True
    grad_accumulation_count: int | None = None
    hooks: bool = True


@dataclass(frozen=True, repr=False)
class ModuleSpec(Record):
    """One module: it calls its children in order, then applies its own layer.

    Attributes:
        join: ``chain`` feeds each child's output to the next, ``sum`` adds the children's outputs.
        checkpoint: how the parent calls it.
        output: the container that its forward returns.
    """

    layer: LayerSpec | None = None
    unit: UnitSpec | None = None
    children: tuple["ModuleSpec", ...] = ()
    join: Join = "chain"
    checkpoint: Checkpoint = "none"
    output: Output = "tensor"


@dataclass(frozen=True, repr=False)
class TieSpec(Record):
    """The layer of ``module`` uses the parameters of the layer of ``source``."""

    source: str
    module: str


@dataclass(frozen=True, repr=False)
class OwnerSpec(Record):
    """One entry of the owner map.

    Attributes:
        parameter: full name, as in ``named_parameters`` of the unsharded model.
        owner: rank inside the mesh of the parameter's unit.
        ranks: the ranks whose map has this entry; None is all.
    """

    parameter: str
    owner: int
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True, repr=False)
class CallsSpec(Record):
    """Which children a module calls in one pass, instead of all of them in order.

    A child that is missing is a branch not taken; one that comes twice is repeated.

    Attributes:
        path: the calling module.
        order: children by number.
        dropped: positions in ``order`` whose output is thrown away.
        ranks: where this holds; None is on all ranks.
    """

    path: str
    order: tuple[int, ...]
    dropped: tuple[int, ...] = ()
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True, repr=False)
class RaiseSpec(Record):
    """An exception that the program raises, catches, and recovers from by ``reset`` and ``zero_grad``.

    Attributes:
        path: the module in whose forward or backward it is raised.
        ranks: where; None is on all ranks. On some only, the others wait for ever.
        reset: whether the program calls ``context.reset()``, or leaves recovery to the runtime.
    """

    path: str
    phase: Literal["forward", "backward"] = "forward"
    ranks: tuple[int, ...] | None = None
    reset: bool = True


@dataclass(frozen=True, repr=False)
class PassSpec(Record):
    """One pass: forwards and, in training, their backwards. A step's training passes are microbatches.

    Attributes:
        kind: ``train``; evaluation under ``no_grad`` or ``inference_mode``; ``enabled`` is a forward
            with gradients enabled and no backward.
        forwards: how many forwards come before the first backward.
        side_stream: whether all forwards but the first run on a second stream, beside the first one.
        backward: ``joint`` adds the losses, ``each`` calls backward on one loss after the other.
        input_grad: whether the input requires a gradient.
    """

    kind: PassKind = "train"
    forwards: int = 1
    side_stream: bool = False
    backward: Backward = "joint"
    input_grad: bool = False
    calls: tuple[CallsSpec, ...] = ()
    raises: RaiseSpec | None = None


@dataclass(frozen=True, repr=False)
class StepSpec(Record):
    """Passes, then one optimizer step and ``zero_grad``.

    Attributes:
        optimize: whether the optimizer steps.
        set_to_none: the argument of the ``zero_grad`` that ends the step.
        export: whether the whole state dict is then put together, which only rank 0 gets.
        freeze: modules whose own parameters are frozen before the step.
        unfreeze: modules whose own parameters are unfrozen before the step.
        resume: save model and optimizer before the step, drop them, and go on from the checkpoint with new
            ones, whose units all have this strategy from now on; None goes on with the old ones.
    """

    passes: tuple[PassSpec, ...] = (PassSpec(),)
    optimize: bool = True
    set_to_none: bool = True
    export: bool = False
    freeze: tuple[str, ...] = ()
    unfreeze: tuple[str, ...] = ()
    resume: Strategy | None = None


@dataclass(frozen=True, repr=False)
class OptimizerSpec(Record):
    """The optimizer; ``lr`` a power of two keeps the weights exact under plain SGD."""

    kind: OptimizerKind = "sgd"
    lr: float = 1.0
    momentum: float = 0.0
    weight_decay: float = 0.0
    implementation: Implementation = "plain"


@dataclass(frozen=True, repr=False)
class ContextSpec(Record):
    """The context: prefetch order and the fields of ``RuntimePolicy``."""

    prefetch_order: Literal["registration", "recorded"] = "registration"
    use_symmetric_memory: bool = False
    overlap_allgather_reduction: bool = True
    overlap_outer_communication: bool = False
    caller_managed_grad_sync: bool = False


@dataclass(frozen=True, repr=False)
class ProgramSpec(Record):
    """A whole training program.

    Attributes:
        model: the top of the module tree.
        mesh: sizes of the mesh's axes, outermost first; their product is the number of ranks.
        width: elements in a row of every input, output and activation.
        batch: rows in each rank's input.
        meta: whether the model is built on the meta device and initialised when it is sharded.
        ties: layers that share their parameters.
        owners: the owner map; what TensorAtomic units need.
        steps: what is run.
        faults: names of the faults to inject, as ``simulate`` takes them.
        schedule: the schedule to run under, as ``replay`` takes it; "" is program order.
    """

    model: ModuleSpec
    mesh: tuple[int, ...] = (2,)
    width: int = 2
    batch: int = 1
    meta: bool = False
    ties: tuple[TieSpec, ...] = ()
    owners: tuple[OwnerSpec, ...] = ()
    context: ContextSpec = ContextSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    steps: tuple[StepSpec, ...] = (StepSpec(),)
    faults: tuple[str, ...] = ()
    schedule: str = ""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.mesh)
