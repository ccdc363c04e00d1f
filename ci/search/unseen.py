"""Bugs planted by someone who has not seen how programs are drawn and checked.

A bug is a name that says what is wrong, and a context manager that makes ``fsdp_core`` wrong while it is
open. It is opened anew around each run, before any model is built. Most replace one function:

    @contextmanager
    def forget_the_last_parameter() -> Iterator[None]:
        def wrong(copy_in):
            @wraps(copy_in)
            def copies_less(group):
                group.members[-1].full.grad = None
                copy_in(group)
            return copies_less
        with replaced(ParameterGroup, "copy_in", wrong):
            yield

    BUGS = {"the last parameter's gradient is forgotten": forget_the_last_parameter}

``python -m ci.search.planted --only forgotten`` tells whether generated programs find it. It must not make
Python fail: a ``TypeError`` of the bug's own says nothing about what is found.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial

from fsdp_core import FsdpContext, dbuffer, device, hooks, optimizer
from fsdp_core.dbuffer import DBuffer
from fsdp_core.parameter_group import ParameterGroup
from fsdp_core.placement import is_sharded
from fsdp_core.prefetcher import Prefetcher
from fsdp_core.weights import Resharded, Unsharded, Weights
from fsdp_sim.mutation.change import replaced

Function = Callable[..., Any]

# ruff: noqa: SLF001 - what is broken is private


# ---------------------------------------------------------------------- waits


def _one_wait_for_both_reductions() -> AbstractContextManager[None]:
    """Take the outer reduction, which runs behind the inner one, for the end of every reduction."""

    def change(finish_grad_sync: Function) -> Function:
        @wraps(finish_grad_sync)
        def wrong(context: Any) -> None:
            with device.annotate("complete"):
                device.wait_stream(context.current_stream(), context.outer_reduction_stream)
                if context.caller_managed_grad_sync:
                    context.sweep()
            context.has_unwaited_reductions = False

        return wrong

    return replaced(FsdpContext, "finish_grad_sync", change)


def _readable_everywhere() -> AbstractContextManager[None]:
    """Let no second stream wait for weights that a first one waited for."""

    def change(demand: Function) -> Function:
        @wraps(demand)
        def wrong(weights: Any) -> None:
            if isinstance(weights._state, Unsharded):
                weights._register_full()
            else:
                demand(weights)

        return wrong

    return replaced(Weights, "demand", change)


def _join_once_a_pass() -> AbstractContextManager[None]:
    """Let no later forward join the gathers that an earlier one joined, until a backward is over."""

    def change(join: Function) -> Function:
        @wraps(join)
        def wrong(context: Any) -> None:
            if not context._gathers_are_joined:
                join(context)

        return wrong

    return replaced(FsdpContext, "_join_gathers", change)


def _evaluation_frees_early() -> AbstractContextManager[None]:
    """Wait for no reader of weights that an evaluation frees, since it writes none."""

    def change(free: Function) -> Function:
        @wraps(free)
        def wrong(weights: Any) -> None:
            context = weights._context
            if not (context.evaluating and isinstance(weights._state, Unsharded)):
                free(weights)
                return
            weights._release()
            weights._state = Resharded()
            context.note_resharded(weights._identity.ref, weights._transient_nbytes)

        return wrong

    return replaced(Weights, "free", change)


# ---------------------------------------------------------------------- shards and gradients


def _equal_by_ends() -> AbstractContextManager[None]:
    """Take pieces for equal where the first and the last are, as if ranks were filled from the front."""

    def change(plan_stages: Function) -> Function:
        @wraps(plan_stages)
        def wrong(*args: Any) -> Any:
            return tuple(
                replace(each, has_equal_pieces=each.pieces[0].numel == each.pieces[-1].numel)
                for each in plan_stages(*args)
            )

        return wrong

    return replaced(dbuffer, "plan_stages", change)


def _reopen_keeps_the_rest() -> AbstractContextManager[None]:
    """Leave the summands of a finished window where they are, beside what is added to it."""

    def change(reopen_window: Function) -> Function:
        @wraps(reopen_window)
        def wrong(group: Any) -> None:
            scattered = 1
            changes = zip(group._gradient, group._optimizer, strict=True)
            for axis, (before, after) in enumerate(changes):
                if isinstance(before, Partial) and is_sharded(after):
                    scattered *= group._spec.axes.sizes[axis]
            group._final_grad.flat.mul_(scattered)

        return wrong

    return replaced(ParameterGroup, "_reopen_window", change)


def _grads_in_compute_dtype() -> AbstractContextManager[None]:
    """Keep gradients in the compute dtype where none is given for them."""

    def change(build_weights: Function) -> Function:
        @wraps(build_weights)
        def wrong(group: Any, main_dtype: Any) -> None:
            if group._spec.precision.main_grads_dtype is None:
                group._main_grad_dtype = group._compute_dtype
            build_weights(group, main_dtype)

        return wrong

    return replaced(ParameterGroup, "_build_weights", change)


# ---------------------------------------------------------------------- prefetches and nested units


def _zero_budget_is_none() -> AbstractContextManager[None]:
    """Take a budget of 0 for no limit."""

    def change(prefetch: Function) -> Function:
        @wraps(prefetch)
        def wrong(prefetcher: Any, module: Any, phase: Any, numel_max: Any, **how: Any) -> None:
            budget = sys.maxsize if numel_max == 0 else numel_max
            prefetch(prefetcher, module, phase, budget, **how)

        return wrong

    return replaced(Prefetcher, "prefetch", change)


def _enter_inner_first() -> AbstractContextManager[None]:
    """Have backward enter units that return one tensor in the order in which they returned it."""

    def change(enter_through: Function) -> Function:
        @wraps(enter_through)
        def wrong(tensor: Any, use: Any) -> None:
            node, uses = getattr(tensor, hooks._USES, (None, None))
            if uses is not None and node is tensor.grad_fn:
                uses.append(use)
            else:
                enter_through(tensor, use)

        return wrong

    return replaced(hooks, "_enter_through", change)


# ---------------------------------------------------------------------- states and recovery


def _empty_ranks_skip_the_gather() -> AbstractContextManager[None]:
    """Let a rank that has no row to send, and will not write, stay away when weights are saved whole."""

    def change(gather: Function) -> Function:
        @wraps(gather)
        def wrong(group: Any) -> Any:
            weight = group.main_weight
            rows = (weight.get_tensor_view(index) for index in range(len(group.members)))
            if dist.get_rank() == 0 or any(each.numel() for each in rows):
                return gather(group)
            return DBuffer.empty(weight.axes, group._replicated, group.layout, weight.flat.dtype)

        return wrong

    return replaced(ParameterGroup, "gather_main_weight", change)


def _reset_keeps_its_place() -> AbstractContextManager[None]:
    """Leave the order of prefetches where a pass broke."""

    def change(reset: Function) -> Function:
        return wraps(reset)(lambda _prefetcher: None)

    return replaced(Prefetcher, "reset", change)


def _shared_step_counter() -> AbstractContextManager[None]:
    """Let parameters that are stepped one by one from now on count up one counter."""

    def change(pack_state: Function) -> Function:
        @wraps(pack_state)
        def wrong(run: Any, public: Any) -> Any:
            theirs = public[run.parts[0].parameter].items()
            common = {key: value for key, value in theirs if not isinstance(value, DTensor)}
            return {**pack_state(run, public), **common}

        return wrong

    return replaced(optimizer, "_pack_state", change)


BUGS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "one wait serves both reductions": _one_wait_for_both_reductions,
    "gathered for one stream, read on any": _readable_everywhere,
    "forwards join the gathers once a pass": _join_once_a_pass,
    "an evaluation frees weights without a wait": _evaluation_frees_early,
    "pieces are equal if the first and the last are": _equal_by_ends,
    "a window opened again keeps its summands": _reopen_keeps_the_rest,
    "gradients are kept in the compute dtype": _grads_in_compute_dtype,
    "a budget of 0 is no limit": _zero_budget_is_none,
    "backward enters inner units first": _enter_inner_first,
    "ranks without rows do not gather": _empty_ranks_skip_the_gather,
    "a reset keeps its place in the order": _reset_keeps_its_place,
    "split parameters share a step counter": _shared_step_counter,
}
