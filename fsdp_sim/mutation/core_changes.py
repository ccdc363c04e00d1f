"""Known bugs of sharded runtimes, as changes of fsdp_core: what broken order alone does not cover.

Source: public bug reports and their fixes in Megatron-FSDP (NVIDIA/Megatron-LM) and FSDP2 (PyTorch).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import torch.distributed as dist

from fsdp_core import FsdpContext, dbuffer
from fsdp_core.collectives import Stage
from fsdp_core.dbuffer import DBuffer
from fsdp_core.parameter_group import ParameterGroup
from fsdp_core.phase import Phase
from fsdp_core.torch_private import in_graph_task
from fsdp_core.unit import ShardedUnit
from fsdp_core.weights import Gathered, Unsharded, Weights
from fsdp_sim.mutation.change import Change

Function = Callable[..., Any]


def _prefetch_when_recomputing(pre_forward: Function) -> Function:
    @wraps(pre_forward)
    def wrong(unit: Any, module: Any) -> None:
        pre_forward(unit, module)
        if in_graph_task():
            unit.prefetch_successors(module, Phase.FORWARD)

    return wrong


def _count_anew_when_recomputing(pre_forward: Function) -> Function:
    @wraps(pre_forward)
    def wrong(unit: Any, module: Any) -> None:
        pre_forward(unit, module)
        if in_graph_task():
            unit.gradients.window = unit.gradients._new_window()  # noqa: SLF001

    return wrong


def _free_where_compute_runs(free: Function) -> Function:
    @wraps(free)
    def wrong(weights: Any) -> None:
        if isinstance(weights._state, Unsharded):  # noqa: SLF001
            weights._release()  # noqa: SLF001
            weights._state = Gathered(weights._state.event, early=False)  # noqa: SLF001
        free(weights)

    return wrong


def _complete_for_each_unit(begin_backward: Function) -> Function:
    @wraps(begin_backward)
    def wrong(context: Any) -> None:
        context._post_backward_hook_registered = False  # noqa: SLF001
        begin_backward(context)

    return wrong


def _keep_what_zero_grad_dropped(prepare_window: Function) -> Function:
    @wraps(prepare_window)
    def wrong(group: Any) -> bool:
        was_used = getattr(group, "_was_used", False)
        prepare_window(group)
        group._was_used = True  # noqa: SLF001
        return was_used

    return wrong


def _keep_what_zero_grad_cannot_see(reopen_window: Function) -> Function:
    @wraps(reopen_window)
    def wrong(group: Any) -> None:
        summands = group._main_grad.flat.clone()  # noqa: SLF001
        reopen_window(group)
        mine = group._final_grad.flat.clone()  # noqa: SLF001
        group._main_grad.flat.copy_(summands)  # noqa: SLF001
        group._final_grad.flat.copy_(mine)  # noqa: SLF001

    return wrong


def _make_each_microbatch_the_last(begin_microbatch: Function) -> Function:
    @wraps(begin_microbatch)
    def wrong(context: Any) -> Any:
        context.is_last_microbatch = True
        return begin_microbatch(context)

    return wrong


def _divide_the_running_total(reduce: Function) -> Function:
    @wraps(reduce)
    def wrong(group: Any) -> None:
        spec = group._spec  # noqa: SLF001
        group._spec = replace(spec, grad_divisor=1)  # noqa: SLF001
        reduce(group)
        group._spec = spec  # noqa: SLF001
        group._main_grad.flat.div_(spec.grad_divisor)  # noqa: SLF001

    return wrong


def _prefetch_on_the_first_rank_alone(prefetch: Function) -> Function:
    @wraps(prefetch)
    def wrong(context: Any, *args: Any) -> None:
        if dist.get_rank() == 0:
            prefetch(context, *args)

    return wrong


def _hold_modules_strongly(init: Function) -> Function:
    @wraps(init)
    def wrong(unit: Any, *args: Any, **kwargs: Any) -> None:
        init(unit, *args, **kwargs)
        unit._strong = [ref() for ref in unit.modules]  # noqa: SLF001

    return wrong


def _gather_inner_axes_first(plan_stages: Function) -> Function:
    @wraps(plan_stages)
    def wrong(layout: Any, axes: Any, source: Any, target: Any) -> Sequence[Stage]:
        stages: Sequence[Stage] = plan_stages(layout, axes, source, target)
        grows = len(stages) > 1 and all(
            s.step.transition is s.step.transition.ALL_GATHER for s in stages
        )
        return _swapped(stages) if grows and axes.sizes[0] == axes.sizes[1] else stages

    return wrong


def _swapped(stages: Sequence[Stage]) -> list[Stage]:
    """Return stages whose groups are those of each other."""
    steps = [stage.step for stage in reversed(stages)]
    return [
        replace(stage, step=replace(stage.step, axis=step.axis))
        for stage, step in zip(stages, steps, strict=True)
    ]


def _describe_even_shards(get_tensor_chunk: Function) -> Function:
    @wraps(get_tensor_chunk)
    def wrong(buffer: Any, index: int) -> Any:
        chunk = get_tensor_chunk(buffer, index)
        ranks, rows = buffer.axes.sizes[0], buffer.layout.tensor_shapes[index][0]
        each = -(-rows // ranks)
        first = min(buffer.axes.coordinate[0] * each, rows)
        return type(chunk)((first, *chunk.offsets[1:]), chunk.sizes)

    return wrong


def changes() -> list[Change]:
    """Return all of them."""
    context = FsdpContext
    return [
        Change(
            "prefetch during recomputation", ShardedUnit, "pre_forward", _prefetch_when_recomputing
        ),
        Change(
            "recomputation starts the countdown anew",
            ShardedUnit,
            "pre_forward",
            _count_anew_when_recomputing,
        ),
        Change("weights are freed where compute runs", Weights, "free", _free_where_compute_runs),
        Change("complete for each unit", context, "begin_backward", _complete_for_each_unit),
        Change(
            "zero_grad misses a gradient",
            ParameterGroup,
            "_prepare_window",
            _keep_what_zero_grad_dropped,
        ),
        Change(
            "zero_grad zeroes the optimizer's view alone",
            ParameterGroup,
            "_reopen_window",
            _keep_what_zero_grad_cannot_see,
        ),
        Change(
            "each microbatch is the last",
            context,
            "begin_microbatch",
            _make_each_microbatch_the_last,
        ),
        Change("divide the running total", ParameterGroup, "reduce", _divide_the_running_total),
        Change(
            "prefetch on one rank alone", context, "prefetch", _prefetch_on_the_first_rank_alone
        ),
        Change("hold modules strongly", ShardedUnit, "__init__", _hold_modules_strongly),
        Change("gather inner axes first", dbuffer, "plan_stages", _gather_inner_axes_first),
        Change("describe even shards", DBuffer, "get_tensor_chunk", _describe_even_shards),
    ]
