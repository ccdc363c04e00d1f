"""Breaking: one synchronisation of fsdp_core left out in a real run, as mutation leaves it out in a world."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from ci.gpu.process import has_gpu
from fsdp_core import device as accelerator
from fsdp_sim.engine import patches
from fsdp_sim.mutation.probe import Probe
from fsdp_sim.mutation.site import Site, Verb
from fsdp_sim.mutation.subject import Subject


@contextmanager
def broken(subject: Subject, site: Site) -> Iterator[None]:
    """Leave one site out inside the scope; to be entered inside ``fsdp_sim.record``."""
    probe, undo = Probe(subject, frozenset((site,))), patches.Patches()
    try:
        for owner, name, verb, instead in _doors(subject):
            undo.replace(owner, name, _left_out(probe, site, verb, getattr(owner, name), instead))
        yield
    finally:
        undo.undo()


def _doors(subject: Subject) -> list[tuple[Any, str, Verb, Callable[..., Any]]]:
    module: Any = torch.cuda if has_gpu() else torch.cpu
    stream, event = module.Stream, module.Event
    keepers = [
        (owner, name, Verb.KEEP_ALIVE, _nothing) for owner, name in subject.holders_of_keep_alive()
    ]
    return [
        (stream, "wait_stream", Verb.WAIT_STREAM, _nothing),
        (stream, "wait_event", Verb.WAIT_EVENT, _nothing),
        (event, "wait", Verb.WAIT_EVENT, _nothing),
        (stream, "record_event", Verb.RECORD_EVENT, lambda _, known=None: known or event()),
        (event, "record", Verb.RECORD_EVENT, _nothing),
        (accelerator, "on_stream", Verb.STREAM, lambda _: nullcontext()),
        (dist.Work, "wait", Verb.WORK_WAIT, lambda *_: True),
        *keepers,
    ]


def _left_out(
    probe: Probe,
    site: Site,
    verb: Verb,
    original: Callable[..., Any],
    instead: Callable[..., Any],
) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        function = instead if verb is site.verb and probe.site(verb) == site else original
        return function(*args, **kwargs)

    return call


def _nothing(*_: Any, **__: Any) -> None:
    return None
