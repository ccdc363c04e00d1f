"""policies, precisions, contexts, optimizers: the options of a unit, a context and an optimizer."""

from hypothesis import strategies as st

from fsdp_sim.program.spec import (
    ContextSpec,
    DType,
    Implementation,
    OptimizerKind,
    OptimizerSpec,
    PrecisionSpec,
    Strategy,
    UnitSpec,
)
from fsdp_sim.strategies.arguments import Draw, check_range, maybe, number, pick

_BUDGET_MAX = 1_000_000


def draw_policy(
    draw: Draw, strategy: Strategy, budget_max: int, *, low_precision: bool
) -> UnitSpec:
    """Draw the options of one unit, as ``policies`` says."""
    if not maybe(draw, 50):
        return UnitSpec(strategy)
    return UnitSpec(
        strategy,
        precision=_precision(draw) if low_precision and maybe(draw, 40) else None,
        grad_divisor=pick(draw, (1, 1, 2, 4)),
        forward_prefetch=_budget(draw, budget_max),
        backward_prefetch=_budget(draw, budget_max),
        reshard_after_forward=not maybe(draw, 30),
    )


def _budget(draw: Draw, budget_max: int) -> int | None:
    if not maybe(draw, 50):
        return None
    return 0 if maybe(draw, 30) else number(draw, 0, budget_max)


def policies(
    strategy: Strategy = "zero3", *, budget_max: int = 24, low_precision: bool = True
) -> st.SearchStrategy[UnitSpec]:
    """Draw the options of one unit; shrinks to the defaults.

    Args:
        strategy: its placements.
        budget_max: largest prefetch budget, in elements.
        low_precision: whether mixed precision may be drawn.

    Example:
        >>> policies("hsdp", budget_max=0)  # never gathers more than one unit ahead

    Raises:
        ConfigError: ``budget_max`` is out of range.
    """
    check_range("budget_max", budget_max, 0, _BUDGET_MAX)
    return st.composite(draw_policy)(strategy, budget_max, low_precision=low_precision)


def precisions() -> st.SearchStrategy[PrecisionSpec]:
    """Draw a mixed-precision policy; shrinks to fp32 main weights and nothing else.

    Example:
        >>> precisions()  # PrecisionSpec(compute="bfloat16", main_grads="float32")
    """
    return st.composite(_precision)()


def _precision(draw: Draw) -> PrecisionSpec:
    dtypes: tuple[DType | None, ...] = (None, "float32", "bfloat16")
    return PrecisionSpec("float32", *(pick(draw, dtypes) for _ in range(3)))


def draw_context(draw: Draw, *, recorded: bool) -> ContextSpec:
    """Draw the options of a context, as ``contexts`` says."""
    if not maybe(draw, 60):
        return ContextSpec()
    return ContextSpec(
        prefetch_order="recorded" if recorded and maybe(draw, 45) else "registration",
        overlap_allgather_reduction=not maybe(draw, 30),
        overlap_outer_communication=maybe(draw, 30),
        caller_managed_grad_sync=maybe(draw, 38),
    )


def contexts(*, recorded: bool = True) -> st.SearchStrategy[ContextSpec]:
    """Draw the options of a context; shrinks to the defaults.

    Args:
        recorded: whether RECORDED prefetch may be drawn.

    Example:
        >>> contexts(recorded=False)
    """
    return st.composite(draw_context)(recorded=recorded)


def draw_optimizer(draw: Draw) -> OptimizerSpec:
    """Draw an optimizer, as ``optimizers`` says."""
    if not maybe(draw, 50):
        return OptimizerSpec()
    kinds: tuple[OptimizerKind, ...] = ("sgd", "sgd", "adam", "adamw")
    kind = pick(draw, kinds)
    momentum = pick(draw, (0.0, 0.5)) if kind == "sgd" else 0.0
    # A fused kernel rounds the tail of a tensor unlike its body, and a shard has another tail; with
    # momentum it fails (torch 2.13) where a parameter gets its first gradient later than others.
    implementations: tuple[Implementation, ...] = ("plain", "foreach", "fused")
    exact = kind == "sgd" and momentum == 0.0
    implementation = pick(draw, implementations if exact else implementations[:2])
    decay = 0.5 if maybe(draw, 20) else 0.0
    rate = pick(draw, (1.0, 0.5)) if kind == "sgd" else 0.5
    return OptimizerSpec(kind, rate, momentum, decay, implementation)


def optimizers() -> st.SearchStrategy[OptimizerSpec]:
    """Draw an element-wise optimizer; shrinks to SGD with learning rate 1.

    Example:
        >>> optimizers()  # OptimizerSpec(kind="adamw", lr=0.5, implementation="foreach")
    """
    return st.composite(draw_optimizer)()
