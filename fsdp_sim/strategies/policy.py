"""policies, precisions, contexts, optimizers: the options of a unit, a context and an optimizer."""

from typing import Any

from hypothesis import strategies as st

from fsdp_sim.program.spec import (
    ContextSpec,
    DType,
    Implementation,
    OptimizerSpec,
    PrecisionSpec,
    Strategy,
    UnitSpec,
)
from fsdp_sim.strategies.arguments import chance, check_range

_BUDGET_MAX = 1_000_000


@st.composite
def _policies(draw: Any, strategy: Strategy, budget_max: int, *, low_precision: bool) -> UnitSpec:
    budgets = st.one_of(st.none(), st.integers(0, budget_max))
    plain = not draw(chance(50))
    if plain:
        return UnitSpec(strategy)
    return UnitSpec(
        strategy,
        precision=draw(precisions()) if low_precision and draw(chance(40)) else None,
        grad_divisor=draw(st.sampled_from((1, 1, 2, 4))),
        forward_prefetch=draw(budgets),
        backward_prefetch=draw(budgets),
        reshard_after_forward=not draw(chance(30)),
    )


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
    return _policies(strategy, budget_max, low_precision=low_precision)


def precisions() -> st.SearchStrategy[PrecisionSpec]:
    """Draw a mixed-precision policy; shrinks to fp32 main weights and nothing else.

    Example:
        >>> precisions()  # PrecisionSpec(compute="bfloat16", main_grads="float32")
    """
    dtypes: st.SearchStrategy[DType | None] = st.sampled_from((None, "float32", "bfloat16"))
    return st.builds(
        PrecisionSpec,
        main_params=st.just("float32"),
        main_grads=dtypes,
        grad_comm=dtypes,
        compute=dtypes,
    )


@st.composite
def _contexts(draw: Any, *, recorded: bool) -> ContextSpec:
    if not draw(chance(60)):
        return ContextSpec()
    return ContextSpec(
        prefetch_order="recorded" if recorded and draw(chance(45)) else "registration",
        overlap_allgather_reduction=not draw(chance(30)),
        overlap_outer_communication=draw(chance(30)),
        caller_managed_grad_sync=draw(chance(20)),
    )


def contexts(*, recorded: bool = True) -> st.SearchStrategy[ContextSpec]:
    """Draw the options of a context; shrinks to the defaults.

    Args:
        recorded: whether RECORDED prefetch may be drawn.

    Example:
        >>> contexts(recorded=False)
    """
    return _contexts(recorded=recorded)


@st.composite
def _optimizers(draw: Any) -> OptimizerSpec:
    if not draw(chance(50)):
        return OptimizerSpec()
    how: Implementation = draw(st.sampled_from(("plain", "foreach", "fused")))
    kind = draw(st.sampled_from(("sgd", "sgd", "adam", "adamw")))
    decay = 0.5 if draw(chance(20)) else 0.0
    if kind != "sgd":
        return OptimizerSpec(kind, 0.5, 0.0, decay, how)
    return OptimizerSpec(
        "sgd", draw(st.sampled_from((1.0, 0.5))), draw(st.sampled_from((0.0, 0.5))), decay, how
    )


def optimizers() -> st.SearchStrategy[OptimizerSpec]:
    """Draw an element-wise optimizer; shrinks to SGD with learning rate 1.

    Example:
        >>> optimizers()  # OptimizerSpec(kind="adamw", lr=0.5, implementation="foreach")
    """
    return _optimizers()
