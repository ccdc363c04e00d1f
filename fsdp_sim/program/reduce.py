"""Reduce: a failing program made smaller by changing it directly, where Hypothesis has stopped; pure but for runs."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fsdp_sim.program.check import SpecError, check_program
from fsdp_sim.program.spec import CallsSpec, ModuleSpec, ProgramSpec
from fsdp_sim.program.tree import replace_module, walk

_PATHS = ("path", "source", "module")
"""Fields that hold the path of a module."""


def reduce_program(
    program: ProgramSpec, fails: Callable[[ProgramSpec], bool], *, runs_max: int = 500
) -> ProgramSpec:
    """Return a program that fails too, and of which nothing can be left out.

    Args:
        program: one that fails.
        fails: whether a program fails in the way that is looked for; asked of valid programs alone.
        runs_max: how often it is asked at most; the smallest program so far is returned then.
    """
    tried = {program}
    runs = 0
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in smaller_programs(program):
            if candidate in tried or not _is_valid(candidate):
                continue
            if runs == runs_max:
                return program
            tried.add(candidate)
            runs += 1
            if fails(candidate):
                program, is_smaller = candidate, True
                break
    return program


def smaller_programs(program: ProgramSpec) -> Iterator[ProgramSpec]:
    """Yield programs with one thing left out, what is large first; not all of them are valid.

    Left out are steps and passes, modules with what speaks of them, and whatever has not its default value.
    """
    for at in range(len(program.steps)):
        yield dataclasses.replace(program, steps=_without(program.steps, at))
    for path, module in walk(program.model):
        for number in range(len(module.children)):
            yield _Cut(path, number).apply(program)
    yield from _with_defaults(program)


def _is_valid(program: ProgramSpec) -> bool:
    try:
        check_program(program)
    except SpecError:
        return False
    return True


def _without(items: tuple[Any, ...], at: int) -> tuple[Any, ...]:
    return items[:at] + items[at + 1 :]


@dataclass(frozen=True)
class _Cut:
    """One child of a module is left out; its later siblings move up, and what spoke of it goes."""

    parent: str
    number: int

    def apply(self, program: ProgramSpec) -> ProgramSpec:
        """Return ``program`` without the child."""
        children = _without(dict(walk(program.model))[self.parent].children, self.number)
        rest = {name: self._kept(getattr(program, name)) for name in ("ties", "owners", "steps")}
        model = replace_module(program.model, self.parent, children=children)
        return dataclasses.replace(program, model=model, **rest)

    def _kept(self, value: Any) -> Any:
        """Return what stays of a record or a tuple of them; None if it spoke of what is gone."""
        if isinstance(value, tuple):
            return tuple(new for each in value if (new := self._kept(each)) is not None)
        if not dataclasses.is_dataclass(value) or isinstance(value, type):
            return value
        if isinstance(value, CallsSpec) and value.path == self.parent:
            value = self._calls(value)
        held = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        new = {name: self._field(name, each) for name, each in held.items()}
        is_gone = any(name in (*_PATHS, "parameter") and new[name] is None for name in new)
        return None if is_gone else dataclasses.replace(value, **new)

    def _field(self, name: str, held: Any) -> Any:
        if name in _PATHS:
            return self._path(held)
        if name in ("freeze", "unfreeze"):
            return tuple(new for path in held if (new := self._path(path)) is not None)
        if name == "parameter":
            path, _, own_name = held.rpartition(".")
            new = self._path(path)
            return None if new is None else f"{new}.{own_name}".removeprefix(".")
        return self._kept(held)

    def _path(self, path: str) -> str | None:
        """Return the path that a module has now; None if it is gone."""
        below = f"{self.parent}." if self.parent else ""
        if not path.startswith(below) or path == self.parent:
            return path
        number, dot, rest = path.removeprefix(below).partition(".")
        if int(number) == self.number:
            return None
        return f"{below}{int(number) - (int(number) > self.number)}{dot}{rest}"

    def _calls(self, calls: CallsSpec) -> CallsSpec:
        places = [place for place, number in enumerate(calls.order) if number != self.number]
        order = tuple(calls.order[at] - (calls.order[at] > self.number) for at in places)
        dropped = tuple(new for new, old in enumerate(places) if old in calls.dropped)
        return dataclasses.replace(calls, order=order, dropped=dropped)


def _with_defaults(value: Any) -> Iterator[Any]:
    """Yield ``value`` with one field at its default, or one item of a tuple left out, outer ones first."""
    if isinstance(value, tuple):
        if not any(isinstance(each, ModuleSpec) for each in value):
            yield from (_without(value, at) for at in range(len(value)))
        for at, each in enumerate(value):
            yield from ((*value[:at], new, *value[at + 1 :]) for new in _with_defaults(each))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(each, getattr(value, each.name)) for each in dataclasses.fields(value)]
        for field, held in fields:
            if _has_simpler_default(field, held):
                yield dataclasses.replace(value, **{field.name: field.default})
        for field, held in fields:
            for new in _with_defaults(held):
                yield dataclasses.replace(value, **{field.name: new})
    elif _is_number(value) and value > 1:
        yield value // 2


def _has_simpler_default(field: dataclasses.Field[Any], held: Any) -> bool:
    """Return whether a field's default is simpler than what it holds: no longer tuple, no larger number."""
    if isinstance(held, tuple) or field.default in (dataclasses.MISSING, held):
        return False
    return not (_is_number(held) and _is_number(field.default) and field.default > held)


def _is_number(value: Any) -> bool:
    return type(value) is int
