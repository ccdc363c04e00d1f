"""Bugs to plant in fsdp_core while a search runs: known ones of sharded runtimes, each by what is wrong.

A bug changes what fsdp_core does and never makes Python fail. ``unseen.py`` has those of someone who has not
seen how programs are drawn and checked.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist

import fsdp_core
from ci.search import unseen
from fsdp_core import device, optimizer
from fsdp_core.dbuffer import DBuffer
from fsdp_core.gradients import Gradients
from fsdp_core.open_units import OpenUnits
from fsdp_core.parameter_group import ParameterGroup
from fsdp_core.torch_private import in_graph_task
from fsdp_core.unit import ShardedUnit
from fsdp_core.weights import Weights
from fsdp_sim.defects import SkippingSGD
from fsdp_sim.mutation.change import replaced
from fsdp_sim.mutation.core_changes import changes
from fsdp_sim.program import shard

Function = Callable[..., Any]
Plant = Callable[[], AbstractContextManager[None]]
"""Puts a bug in while it is open."""
_CPU = torch.device("cpu")


def plants() -> dict[str, Plant]:
    """Return all bugs by name: those of the mutation, those of this file, then the unseen ones."""
    return {change.name: change.in_force for change in changes()} | _OWN | unseen.BUGS


# ---------------------------------------------------------------------- waits that are missing


def _no_wait(caller: str, *, first: bool | None = None) -> Plant:
    """Return the bug that a function does not wait: at all, or at its first or later waits."""

    def change(wait_stream: Function) -> Function:
        @wraps(wait_stream)
        def wrong(waiter: Any, other: Any) -> None:
            code = sys._getframe(1).f_code  # noqa: SLF001 - who waits is what is broken
            is_first = waiter == device.current_stream(_CPU)
            if code.co_name != caller or first not in (None, is_first):
                wait_stream(waiter, other)

        return wrong

    return lambda: replaced(device, "wait_stream", change)


# ---------------------------------------------------------------------- memory of the wrong stream


@contextmanager
def _allocate_weights_where_compute_runs() -> Iterator[None]:
    """Take the memory of full weights from the pool of the stream that computes."""

    def noting(gather: Function) -> Function:
        @wraps(gather)
        def wrong(weights: Any, **how: Any) -> None:
            for group in weights._groups:  # noqa: SLF001
                group.computes_on = weights._context.current_stream()  # noqa: SLF001
            gather(weights, **how)

        return wrong

    def elsewhere(unshard: Function) -> Function:
        @wraps(unshard)
        def wrong(group: Any) -> Any:
            if not group.keeps_full:
                with device.on_stream(group.computes_on):
                    group.full_weight.reallocate_storage()
            return unshard(group)

        return wrong

    with replaced(Weights, "_gather", noting), replaced(ParameterGroup, "unshard", elsewhere):
        yield


def _noting_stream(reduce: Function) -> Function:
    """Have a reduction tell its groups which stream computes."""

    @wraps(reduce)
    def wrong(gradients: Any) -> None:
        for group in gradients._groups:  # noqa: SLF001
            group.computes_on = gradients._context.current_stream()  # noqa: SLF001
        reduce(gradients)

    return wrong


def _allocating_where_compute_runs(allocate: Function) -> Function:
    @wraps(allocate)
    def wrong(group: Any) -> None:
        with device.on_stream(group.computes_on):
            allocate(group)

    return wrong


@contextmanager
def _allocate_gradients_where_compute_runs() -> Iterator[None]:
    """Take the memory of gradient buffers from the pool of the stream that computes."""
    allocate = _allocating_where_compute_runs
    with (
        replaced(Gradients, "reduce", _noting_stream),
        replaced(ParameterGroup, "allocate_gradients", allocate),
    ):
        yield


@contextmanager
def _replace_main_gradients_while_they_are_read() -> Iterator[None]:
    """Allocate main gradients where compute runs, and replace them on the stream that reduces."""

    def allocating(allocate: Function) -> Function:
        @wraps(allocate)
        def wrong(group: Any) -> None:
            if group._main_grad is not None and group._main_grad.is_released:  # noqa: SLF001
                with device.on_stream(group.computes_on):
                    group._main_grad.reallocate_storage()  # noqa: SLF001
            allocate(group)

        return wrong

    def replacing(reduce: Function) -> Function:
        @wraps(reduce)
        def wrong(group: Any) -> None:
            reduce(group)
            main = group._main_grad  # noqa: SLF001
            kept = main.flat.clone()
            main.release_storage()
            main.reallocate_storage()
            main.flat.copy_(kept)

        return wrong

    with (
        replaced(Gradients, "reduce", _noting_stream),
        replaced(ParameterGroup, "allocate_gradients", allocating),
        replaced(ParameterGroup, "reduce", replacing),
    ):
        yield


def _drop_the_buffer_of_an_outer_reduction() -> AbstractContextManager[None]:
    """Have the outer reduction read a buffer that goes back to the inner stream's pool at once."""

    def change(finish_window: Function) -> Function:
        @wraps(finish_window)
        def wrong(group: Any) -> None:
            context = group.unit().context
            inner, outer = context.inner_reduction_stream, context.outer_reduction_stream
            if inner is outer:
                finish_window(group)
                return
            main = group._main_grad  # noqa: SLF001
            with device.on_stream(inner):
                copy = DBuffer.empty(main.axes, main.placements, main.layout, main.flat.dtype)
                copy.flat.copy_(main.flat)
            device.wait_stream(outer, inner)
            copy.redistribute(group._optimizer, out=group._final_grad)  # noqa: SLF001

        return wrong

    return replaced(ParameterGroup, "finish_window", change)


def _pack_on_the_stream_of_the_gather() -> AbstractContextManager[None]:
    """Pack gradients on the stream that was current where the unit was gathered, not on this one."""

    def change(copy_in: Function) -> Function:
        @wraps(copy_in)
        def wrong(group: Any) -> None:
            with device.on_stream(group.unit().context.allgather_stream):
                copy_in(group)

        return wrong

    return replaced(ParameterGroup, "copy_in", change)


# ---------------------------------------------------------------------- windows and their ends


def _nothing(right: Function) -> Function:
    return wraps(right)(lambda _unit: None)


def _leave_unused_gathers() -> AbstractContextManager[None]:
    return replaced(ShardedUnit, "come_to_rest", _nothing)


@contextmanager
def _add_earlier_microbatches_behind_the_outer_reduction() -> Iterator[None]:
    """Reduce the last contribution alone over the outer axis, and add the others to the result."""

    def setting_aside(reduce: Function) -> Function:
        @wraps(reduce)
        def wrong(group: Any) -> None:
            main, is_last = group._main_grad, group.unit().context.is_last_microbatch  # noqa: SLF001
            group.earlier = None
            if is_last and group.finishes_apart and group.awaits_finish:
                group.earlier = group._final_grad.flat.clone()  # noqa: SLF001
                main.flat.zero_()
            reduce(group)

        return wrong

    def adding(finish_window: Function) -> Function:
        @wraps(finish_window)
        def wrong(group: Any) -> None:
            finish_window(group)
            if group.earlier is not None:
                group._final_grad.flat.add_(group.earlier)  # noqa: SLF001
                group.earlier = None

        return wrong

    with (
        replaced(ParameterGroup, "reduce", setting_aside),
        replaced(ParameterGroup, "finish_window", adding),
    ):
        yield


def _reduce_before_weights_are_freed() -> AbstractContextManager[None]:
    def change(_finish: Function) -> Function:
        @wraps(_finish)
        def wrong(unit: Any) -> None:
            unit.gradients.reduce()
            if not (unit.weights.has_frozen and in_graph_task()):
                unit._leave_weights()  # noqa: SLF001
                unit._close()  # noqa: SLF001

        return wrong

    return replaced(ShardedUnit, "_finish_gradients", change)


def _ignore_nested_backwards() -> AbstractContextManager[None]:
    def change(retry: Function) -> Function:
        @wraps(retry)
        def wrong(unit: Any) -> None:
            unit.gradients.window.nested = False
            retry(unit)

        return wrong

    return replaced(ShardedUnit, "retry", change)


# ---------------------------------------------------------------------- orders and optimizers


def _complete_in_another_order_on_each_rank() -> AbstractContextManager[None]:
    def change(complete: Function) -> Function:
        @wraps(complete)
        def wrong(open_units: Any) -> None:
            if dist.get_rank() % 2:
                open_units._units.reverse()  # noqa: SLF001
            complete(open_units)

        return wrong

    return replaced(OpenUnits, "complete", change)


@contextmanager
def _reduce_in_the_order_of_a_set() -> Iterator[None]:
    """Let every unit wait for the end of backward, and complete them in the order of a set of modules."""

    def by_set(complete: Function) -> Function:
        @wraps(complete)
        def wrong(open_units: Any) -> None:
            units = {unit.modules[0](): unit for unit in open_units._units}  # noqa: SLF001
            open_units._units[:] = [units[module] for module in set(units)]  # noqa: SLF001
            complete(open_units)

        return wrong

    with replaced(ShardedUnit, "retry", _nothing), replaced(OpenUnits, "complete", by_set):
        yield


@contextmanager
def _skip_before_an_empty_shard() -> Iterator[None]:
    """Hand parameters to an optimizer as they come, to one that loses updates where the last one is empty.

    The runtime hands it empty shards first, so that nothing is lost: it must not forget to.
    """

    def skipping(make_optimizer: Function) -> Function:
        @wraps(make_optimizer)
        def wrong(spec: Any, parameters: Any) -> Any:
            is_plain = spec.kind == "sgd" and not (spec.momentum or spec.weight_decay)
            return (
                SkippingSGD(parameters, spec.lr) if is_plain else make_optimizer(spec, parameters)
            )

        return wrong

    def trusting(fully_shard_optimizer: Function) -> Function:
        return wraps(fully_shard_optimizer)(partial(fully_shard_optimizer, elementwise=True))

    with (
        replaced(shard, "make_optimizer", skipping),
        replaced(fsdp_core, "fully_shard_optimizer", trusting),
        replaced(optimizer, "_has_elements", lambda _right: lambda _plain: True),
    ):
        yield


_OWN: dict[str, Plant] = {
    "gathers do not wait for the optimizer": _no_wait("_join_gathers"),
    "weights are freed before their readers are done": _no_wait("free"),
    "gradients are packed before the buffer is free": _no_wait("reduce", first=True),
    "reductions do not wait for the packing": _no_wait("reduce", first=False),
    "the optimizer does not wait for reductions": _no_wait("finish_grad_sync"),
    "the outer reduction does not wait for the inner one": _no_wait("_finish_apart"),
    "weights are allocated where compute runs": _allocate_weights_where_compute_runs,
    "gradients are allocated where compute runs": _allocate_gradients_where_compute_runs,
    "main gradients are replaced while they are read": _replace_main_gradients_while_they_are_read,
    "the buffer of an outer reduction is dropped": _drop_the_buffer_of_an_outer_reduction,
    "packing runs on the stream of the gather": _pack_on_the_stream_of_the_gather,
    "unused gathers stay in flight": _leave_unused_gathers,
    "earlier microbatches are added behind the outer reduction": (
        _add_earlier_microbatches_behind_the_outer_reduction
    ),
    "gradients are reduced before weights are freed": _reduce_before_weights_are_freed,
    "a nested backward completes the unit": _ignore_nested_backwards,
    "open units are completed in another order on each rank": (
        _complete_in_another_order_on_each_rank
    ),
    "reductions come in the order of a set": _reduce_in_the_order_of_a_set,
    "an empty shard is handed last to an optimizer that skips what is before it": _skip_before_an_empty_shard,
}
