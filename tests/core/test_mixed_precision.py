"""Mixed precision: the four dtypes of a unit, and what is cast when."""

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_core
from fsdp_core import MixedPrecisionPolicy
from tests.cases.programs import batch, fill, linear, loss_of, shard
from tests.core.strategies import STRATEGIES, Collectives, P, S, mesh_shape, placements_of
from tests.core.worlds import on_ranks, world_size


class Casts(TorchDispatchMode):
    """Counts copies from fp32 to bf16."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count what casts, and run it."""
        if func is torch.ops.aten.copy_.default:
            self.count += (args[0].dtype, args[1].dtype) == (torch.bfloat16, torch.float32)
        return func(*args, **(kwargs or {}))


@pytest.mark.everywhere
@pytest.mark.parametrize("name", ["zero_1", "zero_2"])
def test_whole_weights_are_cast_and_gathered_once_for_each_step_of_the_optimizer(name: str) -> None:
    """Three steps of three microbatches: three casts and three gathers, not nine."""

    def body(rank: int) -> tuple[int, int]:
        model = fill(linear(4, 2))
        policy = MixedPrecisionPolicy(compute_dtype=torch.bfloat16)
        placements = placements_of(name)
        context = shard(model, "", placements=placements, mixed_precision_policy=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        fsdp_core.fully_shard_optimizer(optimizer)
        with Collectives() as collectives, Casts() as casts:
            for _ in range(3):
                for micro in range(3):
                    with fsdp_core.microbatch(context, is_last=micro == 2):
                        model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return casts.count, collectives.counts["all-gather"]

    assert on_ranks(body, 2) == [(3, 3)] * 2


@pytest.mark.everywhere
@pytest.mark.parametrize(
    ("main_params", "main_grads"), [(torch.float64, torch.float32), (torch.float32, torch.float64)]
)
@pytest.mark.parametrize("name", STRATEGIES)
def test_four_dtypes_are_independent(
    name: str, main_params: torch.dtype, main_grads: torch.dtype
) -> None:
    """Main weights, main gradients, reductions and compute each have the dtype asked for.

    Whichever of the first two is that of the model, fp32. Gathers carry the compute dtype. What a
    window ends with reduces main gradients, in their own.
    """
    policy = MixedPrecisionPolicy(
        main_params_dtype=main_params,
        main_grads_dtype=main_grads,
        grad_comm_dtype=torch.float16,
        compute_dtype=torch.bfloat16,
    )

    def body(rank: int) -> tuple[Any, ...]:
        model = fill(linear(4, 2))
        seen: list[torch.dtype] = []
        mesh, placements = mesh_shape(name), placements_of(name)
        shard(model, "", mesh=mesh, placements=placements, mixed_precision_policy=policy)
        model.register_forward_hook(lambda _m, _a, y: seen.append(y.dtype))
        with Collectives() as collectives:
            loss_of(model(batch(rank).bfloat16()).float(), rank).backward()
        weight = dict(model.named_parameters())["weight"]
        assert isinstance(weight, DTensor)
        assert isinstance(weight.grad, DTensor)
        gathered = collectives.dtypes.pop("all-gather", set())
        reduced = set().union(*collectives.dtypes.values())
        return weight.dtype, weight.grad.dtype, seen, gathered, reduced

    parameter, gradient, optimizer = STRATEGIES[name]
    reduced = set()
    if set(gradient) != {P}:
        reduced.add(torch.float16)
    if gradient != optimizer:
        reduced.add(main_grads)
    gathered = {torch.bfloat16} if S in (*parameter, *optimizer) else set()
    expected = (main_params, main_grads, [torch.bfloat16], gathered, reduced)
    assert on_ranks(body, world_size(4)) == [expected] * world_size(4)


@pytest.mark.everywhere
def test_compute_weights_follow_main_weights_that_were_written_in_place() -> None:
    """Whoever writes them, the next forward sees it, also where weights are kept whole."""

    def body(rank: int) -> list[float]:
        seen = []
        for name in ("zero_3", "zero_1", "no_shard"):
            model = fill(linear())
            policy = MixedPrecisionPolicy(compute_dtype=torch.bfloat16)
            placements = placements_of(name)
            shard(model, "", placements=placements, mixed_precision_policy=policy)
            with torch.no_grad():
                model(batch(rank).bfloat16())
                for parameter in model.parameters():
                    parameter.fill_(3.0)
                seen.append(model(torch.ones(1, 2).bfloat16()).sum().item())
        return seen

    assert on_ranks(body, 2) == [[12.0] * 3] * 2
