"""owner_maps: which rank owns each parameter; right, or wrong on purpose."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hypothesis import strategies as st

from fsdp_sim.errors import ConfigError
from fsdp_sim.program.check import RANKS_MAX
from fsdp_sim.program.spec import OwnerSpec
from fsdp_sim.strategies.arguments import Draw, check_kinds, check_range, number, pick

OwnerKind = Literal["valid", "missing", "out_of_range", "negative", "disagreeing"]
OWNER_KINDS: tuple[OwnerKind, ...] = (
    "valid", "missing", "out_of_range", "negative", "disagreeing",
)  # fmt: skip


@dataclass(frozen=True)
class OwnerMap:
    """An owner map and what a runtime must say to it.

    Attributes:
        owners: the entries.
        kind: what is wrong with it, or ``valid``.
        error: name of the error that sharding must raise; None for a valid map.
        match: what its message must contain.
    """

    owners: tuple[OwnerSpec, ...]
    kind: OwnerKind = "valid"
    error: str | None = None
    match: str = ""


def owner_maps(
    parameters: Sequence[str], world_size: int, *, kinds: Sequence[OwnerKind] = ("valid",)
) -> st.SearchStrategy[OwnerMap]:
    """Draw an owner for each of ``parameters``; shrinks to rank 0 owning everything.

    Args:
        parameters: full names, tied ones once.
        world_size: number of ranks of the unit's mesh.
        kinds: which maps to draw; all but ``valid`` are wrong on purpose.

    Example:
        >>> owner_maps(("0.weight", "1.weight"), 2, kinds=("missing", "disagreeing"))

    Raises:
        ConfigError: an unknown kind; no parameter, or a world of one, for a kind that needs one more.
    """
    check_range("world_size", world_size, 1, RANKS_MAX)
    check_kinds("kinds", kinds, OWNER_KINDS)
    if not parameters and list(kinds) != ["valid"]:
        raise ConfigError("parameters must name one at least for a map that is wrong, got none")
    if world_size == 1 and "disagreeing" in kinds:
        raise ConfigError("ranks can disagree in a world of two at least, got world_size 1")
    return st.composite(draw_owners)(tuple(parameters), world_size, tuple(kinds))


def draw_owners(
    draw: Draw,
    parameters: tuple[str, ...],
    world_size: int,
    kinds: tuple[OwnerKind, ...] = ("valid",),
) -> OwnerMap:
    """Draw an owner map, as ``owner_maps`` says."""
    owners = [OwnerSpec(name, number(draw, 0, world_size - 1)) for name in parameters]
    kind = pick(draw, kinds)
    if kind == "valid":
        return OwnerMap(tuple(owners))
    place = number(draw, 0, len(owners) - 1)
    name = owners[place].parameter
    owners[place : place + 1] = _spoilt(owners[place], kind, world_size)
    return OwnerMap(tuple(owners), kind, "ConfigError", name)


def _spoilt(owner: OwnerSpec, kind: OwnerKind, world_size: int) -> list[OwnerSpec]:
    """Return what stands in place of a right entry."""
    if kind == "missing":
        return []
    if kind == "out_of_range":
        return [OwnerSpec(owner.parameter, world_size)]
    if kind == "negative":
        return [OwnerSpec(owner.parameter, -1)]
    last = world_size - 1
    other = (owner.owner + 1) % world_size
    return [
        OwnerSpec(owner.parameter, owner.owner, tuple(range(last))),
        OwnerSpec(owner.parameter, other, (last,)),
    ]
