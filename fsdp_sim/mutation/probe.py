"""The probe: sees each call of a verb, attributes it to its site, and breaks it there.

It stands between the program and the simulator's own streams, events and works, so that it sees what
any package calls, under whatever name.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from fsdp_sim.engine import machine as machines
from fsdp_sim.engine import patches, streams, work
from fsdp_sim.engine.machine import Machine
from fsdp_sim.mutation.site import Site, Verb
from fsdp_sim.mutation.subject import Subject

_SIMULATOR = str(Path(__file__).parents[1])
_PROGRAMS = tuple(
    str(Path(__file__).parents[1] / name)
    for name in ("program", "mutation/fsdp2.py", "mutation/core_functions.py")
)
"""Files of the simulator that are programs, not part of what runs them."""
_TRANSPARENT = ("/contextlib.py",)


@dataclass
class Use:
    """What the calls of one site did.

    Attributes:
        calls: how many there were.
        spans: (rank, first op, end) of each call, or of the body of each stream context.
        storages: (rank, storage) of each reference that was kept.
    """

    calls: int = 0
    spans: list[tuple[int, int, int]] = field(default_factory=list)
    storages: list[tuple[int, int]] = field(default_factory=list)


class Probe:
    """Breaks the sites in ``broken``, and keeps what all sites did.

    Attributes:
        uses: by site, in order of first call.
    """

    def __init__(self, subject: Subject, broken: frozenset[Site] = frozenset()) -> None:
        self.subject = subject
        self.broken = broken
        self.uses: dict[Site, Use] = {}
        self._roles: dict[CodeType, str | None] = {}
        self._inside: set[int] = set()
        self._open: dict[int, list[tuple[Any, Site, int]]] = {}

    # ------------------------------------------------------------------ sites

    def site(self, verb: Verb) -> Site | None:
        """Return the call's site; None if the caller is not the package's own source."""
        frame: FrameType | None = sys._getframe(2)  # noqa: SLF001  the only way to the caller's line
        while frame is not None:
            role = self._role(frame.f_code)
            if role is None:
                return None
            if role:
                return Site(role, frame.f_lineno, verb)
            frame = frame.f_back
        return None

    def _role(self, code: CodeType) -> str | None:
        """Return the file of the package; "" for what sites look through; None for other code."""
        if code not in self._roles:
            self._roles[code] = self._role_of(code.co_filename)
        return self._roles[code]

    def _role_of(self, path: str) -> str | None:
        if Path(path) in self.subject.seams or path.endswith(_TRANSPARENT):
            return ""
        file = self.subject.file_of(path)
        if file is not None:
            return file
        is_simulator = path.startswith(_SIMULATOR) and not path.startswith(_PROGRAMS)
        return "" if is_simulator else None

    # ------------------------------------------------------------------ calls

    def call(
        self,
        verb: Verb,
        original: Callable[..., Any],
        instead: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Make one call of a verb, or what stands for it where its site is broken."""
        machine = machines.current()
        if machine is None or machine.rank.index in self._inside or _orders_nothing(verb, args):
            return original(*args, **kwargs)
        site = self.site(verb)
        if site is None:
            return original(*args, **kwargs)
        use = self._use(site, machine, args)
        is_broken = site in self.broken
        rank, first = machine.rank.index, machine.op_count
        if verb is Verb.STREAM:
            self._open.setdefault(rank, []).append((args[0], site, first))
        if is_broken:
            return instead(*args, **kwargs)
        self._inside.add(rank)
        try:
            return original(*args, **kwargs)
        finally:
            self._inside.discard(rank)
            if verb is not Verb.STREAM:
                use.spans.append((rank, first, machine.op_count))

    def _use(self, site: Site, machine: Machine, args: tuple[Any, ...]) -> Use:
        use = self.uses.get(site)
        if use is None:
            use = self.uses[site] = Use()
        use.calls += 1
        if site.verb is Verb.KEEP_ALIVE and isinstance(args[0], torch.Tensor):
            use.storages.append((machine.rank.index, machine.memory.record_of(args[0]).ordinal))
        return use

    def leave(self, context: Any) -> None:
        """A stream context ends: its body is the span of its site."""
        machine = machines.current()
        entered = self._open.get(machine.rank.index) if machine is not None else None
        if machine is not None and entered and entered[-1][0] is context:
            _, site, first = entered.pop()
            self.uses[site].spans.append((machine.rank.index, first, machine.op_count))


# ---------------------------------------------------------------------- installation


@contextmanager
def installed(probe: Probe) -> Iterator[Probe]:
    """Let a probe see all calls of the worlds that are run inside."""
    undo = patches.Patches()
    try:
        for owner, name, verb, instead in _doors():
            undo.replace(owner, name, _seen(probe, verb, getattr(owner, name), instead))
        for owner in (streams.StreamContext, streams.Stream):
            undo.replace(owner, "__exit__", _left(probe, owner.__exit__))
        for owner, name in probe.subject.holders_of_keep_alive():
            undo.replace(owner, name, _seen(probe, Verb.KEEP_ALIVE, getattr(owner, name), _nothing))
        undo.replace(
            torch.UntypedStorage, "resize_", _releasing(probe, torch.UntypedStorage.resize_)
        )
        yield probe
    finally:
        undo.undo()


def _doors() -> list[tuple[Any, str, Verb, Callable[..., Any]]]:
    """Return every method and function that a verb is called through, and what stands for a broken one."""
    return [
        (streams.Stream, "wait_stream", Verb.WAIT_STREAM, _nothing),
        (streams.Stream, "wait_event", Verb.WAIT_EVENT, _nothing),
        (streams.Event, "wait", Verb.WAIT_EVENT, _nothing),
        (streams.Stream, "record_event", Verb.RECORD_EVENT, _unrecorded),
        (streams.Event, "record", Verb.RECORD_EVENT, _nothing),
        (streams.StreamContext, "__enter__", Verb.STREAM, _stay),
        (streams.Stream, "__enter__", Verb.STREAM, _stay),
        (work.Work, "wait", Verb.WORK_WAIT, _done),
        (work.Work, "synchronize", Verb.WORK_WAIT, _nothing),
        (work.Work, "block_current_stream", Verb.WORK_WAIT, _nothing),
        (streams.Stream, "synchronize", Verb.SYNCHRONIZE, _nothing),
        (streams.Event, "synchronize", Verb.SYNCHRONIZE, _nothing),
        (streams, "synchronize", Verb.SYNCHRONIZE, _nothing),
        (streams, "record_stream", Verb.KEEP_ALIVE, _nothing),
    ]


def _seen(
    probe: Probe, verb: Verb, original: Callable[..., Any], instead: Callable[..., Any]
) -> Callable[..., Any]:
    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return probe.call(verb, original, instead, args, kwargs)

    return call


def _orders_nothing(verb: Verb, args: tuple[Any, ...]) -> bool:
    """Whether this is a wait for a collective that ran on the current stream already.

    `torch.distributed` makes it of each synchronous collective, for groups whose host must wait.
    """
    return verb is Verb.WORK_WAIT and args[0].is_synchronous


def _left(probe: Probe, original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def leave(context: Any, *exc: Any) -> Any:
        probe.leave(context)
        return original(context, *exc)

    return leave


def _releasing(probe: Probe, original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def resize_(storage: Any, nbytes: int) -> Any:
        if nbytes != 0 or storage.nbytes() == 0:
            return original(storage, nbytes)
        return probe.call(Verb.RELEASE, original, _keep, (storage, nbytes), {})

    return resize_


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _done(*_: Any, **__: Any) -> bool:
    return True


def _unrecorded(_stream: Any, event: Any = None) -> Any:
    return torch.cpu.Event() if event is None else event


def _stay(context: Any) -> Any:
    """Enter a stream context without leaving the current stream."""
    machine = machines.current()
    assert machine is not None, "calls are broken on ranks only"
    if getattr(context, "stream", context) is not None:
        context._outer.append(machine.stream)  # noqa: SLF001  what its __exit__ goes back to
    return context if isinstance(context, streams.Stream) else None


def _keep(storage: Any, _nbytes: int) -> Any:
    return storage
