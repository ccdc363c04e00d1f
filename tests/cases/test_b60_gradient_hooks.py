"""B60: a hook of a sharded parameter's gradient fires, or is refused where it never would."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fsdp_sim
from fsdp_core import RuntimePolicy, StateError
from tests.cases.programs import Row, batch, fill, local_rows, loss_of, shard


def backward(model: nn.Module, rank: int, number: int = 0) -> None:
    """A forward and backward."""
    loss_of(model(batch(rank, number)), rank).backward()


@pytest.mark.parametrize("mesh", [(2,), (2, 2)], ids=["sharded", "hybrid"])
def test_a_post_accumulate_hook_fires_once_for_each_backward(mesh: tuple[int, ...]) -> None:
    """meta-pytorch/torchrec#4268: behind the reduction, in order on the current stream."""

    def program(rank: int) -> None:
        model = fill(Row("a", "b"))
        policy = RuntimePolicy(overlap_outer_communication=True)
        shard(model, "a", "b", "", mesh=mesh, runtime_policy=policy)
        fired: list[str] = []

        def doubles(name: str) -> None:
            def hook(parameter: Tensor) -> None:
                assert isinstance(parameter.grad, DTensor)
                parameter.grad.to_local().mul_(2)
                fired.append(name)

            model.get_parameter(name).register_post_accumulate_grad_hook(hook)

        backward(model, rank)
        plain = local_rows(model, grads=True)
        model.zero_grad()
        for name in ("a.weight", "b.weight"):
            doubles(name)
        for number in range(2):
            backward(model, rank)
            assert sorted(fired) == sorted(["a.weight", "b.weight"] * (number + 1))
            for name, gradient in local_rows(model, grads=True).items():
                expected = plain[name]
                assert gradient is not None
                assert expected is not None
                assert torch.equal(gradient, expected * 2)
            model.zero_grad()

    fsdp_sim.simulate(program, torch.Size(mesh).numel())


def test_a_hook_without_its_order_would_race() -> None:
    """The wait in front of the hooks is what orders them; without it the simulator reports."""

    def program(rank: int) -> None:
        model = fill(Row("a", "b"))
        context = shard(model, "a", "b", "")
        model.get_parameter("a.weight").register_post_accumulate_grad_hook(
            lambda parameter: parameter.grad.to_local().mul_(2)
        )
        context.finish_grad_sync = lambda: None  # type: ignore[method-assign]
        backward(model, rank)

    report = fsdp_sim.simulate(program, 2, strict=False)

    assert "Race" in {finding.kind for finding in report.findings}


def test_a_hook_that_would_never_fire_is_refused() -> None:
    """`register_hook`, on a parameter of a sharded module."""

    def program(rank: int) -> str:
        model = fill(Row("a"))
        shard(model, "a", "")
        with pytest.raises(StateError) as caught:
            model.get_parameter("a.weight").register_hook(lambda gradient: gradient)
        return str(caught.value)

    message = (
        "a hook must be one that is called, got register_hook on the sharded parameter 'weight', "
        "whose gradient is reduced, not accumulated; use register_post_accumulate_grad_hook"
    )
    assert fsdp_sim.simulate(program, 2).results == [message, message]
