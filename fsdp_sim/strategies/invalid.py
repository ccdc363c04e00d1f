"""invalid_programs: programs that are wrong on purpose, each with the error that must come."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from fsdp_sim.program.spec import (
    CallsSpec,
    ContextSpec,
    LayerSpec,
    ModuleSpec,
    PassSpec,
    ProgramSpec,
    RaiseSpec,
    StepSpec,
    TieSpec,
    UnitSpec,
)
from fsdp_sim.program.tree import parameter_names
from fsdp_sim.strategies.arguments import check_kinds
from fsdp_sim.strategies.owner import OWNER_KINDS, OwnerMap, owner_maps

_RECORDED = ContextSpec(prefetch_order="recorded")


@dataclass(frozen=True)
class InvalidProgram:
    """A program that is wrong on purpose.

    Attributes:
        program: what to run.
        kind: what is wrong with it.
        error: name of the class of the error that must come.
        match: what its message must contain.
    """

    program: ProgramSpec
    kind: str
    error: str
    match: str = ""


def invalid_programs(*, kinds: Sequence[str] | None = None) -> st.SearchStrategy[InvalidProgram]:
    """Draw a small program that must be refused, or found wrong, with the expected error attached.

    Args:
        kinds: what is wrong with it; ``INVALID_KINDS`` by default.

    Example:
        >>> invalid_programs(kinds=("tied over two units",))

    Raises:
        ConfigError: an unknown kind.
    """
    chosen = tuple(INVALID_KINDS) if kinds is None else tuple(kinds)
    check_kinds("kinds", chosen, tuple(INVALID_KINDS))
    return st.sampled_from(chosen).flatmap(lambda kind: INVALID_KINDS[kind](kind))


def two_units(unit: UnitSpec | None = None, *calls: CallsSpec) -> ProgramSpec:
    """Return a program of two units of one linear each, called in order or as ``calls`` say."""
    child = ModuleSpec(LayerSpec(), unit or UnitSpec())
    steps = (StepSpec((PassSpec(calls=calls),)),)
    return ProgramSpec(ModuleSpec(children=(child, child)), steps=steps)


Make = Callable[[str], st.SearchStrategy[InvalidProgram]]


def _one(program: ProgramSpec, error: str, match: str = "") -> Make:
    return lambda kind: st.just(InvalidProgram(program, kind, error, match))


def _bad_unit(field: str, values: st.SearchStrategy[int], match: str) -> Make:
    def make(kind: str) -> st.SearchStrategy[InvalidProgram]:
        return values.map(
            lambda value: InvalidProgram(
                two_units(_unit_with(field, value)), kind, "ConfigError", match
            )
        )

    return make


def _unit_with(field: str, value: int) -> UnitSpec:
    options: dict[str, Any] = {field: value}
    return UnitSpec(**options)


def _bad_owners(kind: str) -> st.SearchStrategy[InvalidProgram]:
    program = two_units(UnitSpec("tensor_atomic"))
    wrong = [owner_kind for owner_kind in OWNER_KINDS if owner_kind != "valid"]
    drawn = owner_maps(parameter_names(program), program.world_size, kinds=wrong)
    return drawn.map(lambda owners: _with_owners(program, kind, owners))


def _with_owners(program: ProgramSpec, kind: str, owners: OwnerMap) -> InvalidProgram:
    """Return ``program`` with a wrong map; a unit knows its parameters by their names inside it."""
    assert owners.error is not None, "only wrong maps are drawn"
    name = owners.match.rpartition(".")[2]
    wrong = replace(program, owners=owners.owners)
    return InvalidProgram(wrong, f"{kind}: {owners.kind}", owners.error, name)


def _passes(program: ProgramSpec, *passes: PassSpec, context: ContextSpec) -> ProgramSpec:
    """Return ``program`` with one step for each pass, in ``context``."""
    return replace(program, context=context, steps=tuple(StepSpec((one,)) for one in passes))


_SWAPPED = CallsSpec("", (1, 0))
_SWAPPED_ON_ONE = CallsSpec("", (1, 0), ranks=(1,))
_MISSING_ON_ONE = CallsSpec("", (0,), ranks=(1,))
_SUM = replace(two_units(), model=replace(two_units().model, join="sum"))
_BRANCHES = ModuleSpec(children=(ModuleSpec(LayerSpec()), ModuleSpec(LayerSpec())))
_AROUND_A_UNIT = ProgramSpec(
    ModuleSpec(LayerSpec(), UnitSpec(), (ModuleSpec(LayerSpec(), UnitSpec()), _BRANCHES)),
    steps=(StepSpec((PassSpec(calls=(CallsSpec("1", (), ranks=(1,)),)),)),),
)

INVALID_KINDS: dict[str, Make] = {
    "divisor not positive": _bad_unit("grad_divisor", st.integers(-2, 0), "divisor"),
    "negative forward budget": _bad_unit(
        "forward_prefetch", st.integers(-3, -1), "forward_prefetch_size"
    ),
    "negative backward budget": _bad_unit(
        "backward_prefetch", st.integers(-3, -1), "backward_prefetch_size"
    ),
    "tied over two units": _one(
        replace(two_units(), ties=(TieSpec("0", "1"),)), "ConfigError", "weight"
    ),
    "wrong owner map": _bad_owners,
    "recorded, two backwards in a pass": _one(
        _passes(two_units(), PassSpec(forwards=2, backward="each"), context=_RECORDED),
        "StateError",
        "RECORDED",
    ),
    "recorded, another order later": _one(
        _passes(two_units(), PassSpec(), PassSpec(calls=(_SWAPPED,)), context=_RECORDED),
        "StateError",
    ),
    "recorded, ranks disagree": _one(
        _passes(_SUM, PassSpec(calls=(_SWAPPED_ON_ONE,)), context=_RECORDED), "CollectiveMismatch"
    ),
    "ranks call units in another order": _one(
        _passes(_SUM, PassSpec(calls=(_SWAPPED_ON_ONE,)), context=ContextSpec()),
        "CollectiveMismatch",
    ),
    "ranks differ around a unit": _one(
        _AROUND_A_UNIT, "CollectiveMismatch", "must agree on all ranks"
    ),
    "one rank leaves a unit out": _one(two_units(None, _MISSING_ON_ONE), "FindingError"),
    "one rank raises": _one(
        _passes(
            two_units(),
            PassSpec(raises=RaiseSpec("1", ranks=(1,))),
            PassSpec(),
            context=ContextSpec(),
        ),
        "FindingError",
    ),
}
