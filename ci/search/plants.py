"""Bugs to plant in fsdp_core while a search runs: those of the mutation, and more of public reports."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from ci.search import unseen
from fsdp_core import FsdpContext, device
from fsdp_core.open_units import OpenUnits
from fsdp_core.torch_private import in_graph_task
from fsdp_core.unit import ShardedUnit
from fsdp_sim.defects import SkippingSGD
from fsdp_sim.mutation.change import Change
from fsdp_sim.mutation.core_changes import changes
from fsdp_sim.program import shard

Function = Callable[..., Any]
_CPU = torch.device("cpu")


def plants() -> dict[str, Callable[[], AbstractContextManager[None]]]:
    """Return all bugs: a name that says what is wrong, and what puts it in while a program runs."""
    return {change.name: change.in_force for change in _changes()} | unseen.BUGS


def _changes() -> list[Change]:
    return [
        *changes(),
        _no_wait("gathers do not wait for the optimizer", "_join_gathers"),
        _no_wait("weights are freed before their readers are done", "free"),
        _no_wait("gradients are packed before the buffer is free", "reduce", first=True),
        _no_wait("reductions do not wait for the packing", "reduce", first=False),
        _no_wait("the optimizer does not wait for reductions", "finish_grad_sync"),
        _no_wait("the outer reduction does not wait for the inner one", "_finish_apart"),
        _no_stream("weights are allocated on the stream that computes", "_gather"),
        _no_stream("gradient buffers are allocated on the stream that computes", "reduce"),
        Change("unused gathers stay in flight", ShardedUnit, "come_to_rest", _nothing),
        Change("each microbatch is the last", FsdpContext, "begin_microbatch", _always_last),
        Change("a nested backward completes the unit", ShardedUnit, "retry", _ignore_nested),
        Change("recomputation starts the countdown anew", ShardedUnit, "pre_forward", _count_anew),
        Change(
            "open units are completed in another order on each rank",
            OpenUnits,
            "complete",
            _order_by_rank,
        ),
        Change("the optimizer skips what is before an empty shard", shard, "make_optimizer", _skip),
    ]


def _no_wait(name: str, caller: str, *, first: bool | None = None) -> Change:
    """Return the bug that a function does not wait: at all, or at its first or later waits."""

    def change(wait_stream: Function) -> Function:
        @wraps(wait_stream)
        def wrong(waiter: Any, other: Any) -> None:
            code = sys._getframe(1).f_code  # noqa: SLF001 - who waits is what is broken
            is_first = waiter == device.current_stream(_CPU)
            if code.co_name != caller or first not in (None, is_first):
                wait_stream(waiter, other)

        return wrong

    return Change(name, device, "wait_stream", change)


def _no_stream(name: str, caller: str) -> Change:
    """Return the bug that a function does its work on the current stream."""

    def change(on_stream: Function) -> Function:
        @wraps(on_stream)
        def wrong(stream: Any) -> Any:
            is_caller = sys._getframe(1).f_code.co_name == caller  # noqa: SLF001 - as above
            return nullcontext() if is_caller else on_stream(stream)

        return wrong

    return Change(name, device, "on_stream", change)


def _nothing(right: Function) -> Function:
    return wraps(right)(lambda _unit: None)


def _always_last(begin_microbatch: Function) -> Function:
    @wraps(begin_microbatch)
    def wrong(context: Any) -> Any:
        context.is_last_microbatch = True
        return begin_microbatch(context)

    return wrong


def _ignore_nested(retry: Function) -> Function:
    @wraps(retry)
    def wrong(unit: Any) -> None:
        unit.gradients.window.nested = False
        retry(unit)

    return wrong


def _count_anew(pre_forward: Function) -> Function:
    @wraps(pre_forward)
    def wrong(unit: Any, module: Any) -> None:
        pre_forward(unit, module)
        if in_graph_task():
            unit.gradients.window = unit.gradients._new_window()  # noqa: SLF001

    return wrong


def _order_by_rank(complete: Function) -> Function:
    @wraps(complete)
    def wrong(open_units: Any) -> None:
        if dist.get_rank() % 2:
            open_units._units.reverse()  # noqa: SLF001
        complete(open_units)

    return wrong


def _skip(_make_optimizer: Function) -> Function:
    return wraps(_make_optimizer)(lambda spec, parameters: SkippingSGD(parameters, spec.lr))
