"""Dispatch: which bytes an operator reads and writes, and which it only looks at the shape of."""

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fsdp_sim
from fsdp_sim.op import Kind
from tests.sim.litmus import is_racy, on_one_rank, ops_of


def on_side(work: Callable[[], object]) -> None:
    """Do work on a stream that waits for nothing."""
    with torch.cpu.stream(torch.cpu.Stream()):
        work()


FACTORIES: dict[str, Callable[[Tensor], Tensor]] = {
    "empty": lambda x: torch.empty(4),
    "empty_like": torch.empty_like,
    "empty_strided": lambda x: torch.empty_strided((4,), (1,)),
    "new_empty": lambda x: x.new_empty(4),
    "empty_permuted": lambda x: torch.empty_permuted((2, 2), (1, 0)),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_an_allocation_writes_no_bytes(name: str) -> None:
    """Another stream may be the first to write fresh memory: nothing is on its way into it."""

    def program() -> None:
        x = torch.ones(4)
        fresh = FACTORIES[name](x)
        on_side(lambda: fresh.fill_(1.0))

    assert not is_racy(program)


def test_what_writes_fresh_memory_still_counts() -> None:
    """The other side of the rule: zeros are bytes."""

    def program() -> None:
        fresh = torch.zeros(4)
        on_side(lambda: fresh.fill_(1.0))

    assert is_racy(program)


SHAPES_ALONE: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: FACTORIES[name] for name in ("empty_like", "new_empty")},
    "zeros_like": torch.zeros_like,
    "ones_like": torch.ones_like,
    "full_like": lambda x: torch.full_like(x, 2.0),
    "rand_like": torch.rand_like,
    "new_zeros": lambda x: x.new_zeros(2),
    "new_full": lambda x: x.new_full((2,), 1.0),
}


@pytest.mark.parametrize("name", SHAPES_ALONE)
def test_an_operator_that_looks_at_a_shape_reads_no_bytes(name: str) -> None:
    """Another stream may be writing them."""

    def program() -> None:
        x = torch.ones(4)
        torch.cpu.synchronize()
        on_side(lambda: x.fill_(2.0))
        SHAPES_ALONE[name](x)

    assert not is_racy(program)


def test_what_looks_like_a_host_tensor_is_the_hosts() -> None:
    """No operator on a device comes of it."""

    def program() -> None:
        torch.zeros_like(torch.tensor([1.0, 2.0]))

    assert not any(op.kind in (Kind.ATEN, Kind.ALLOC) for op in ops_of(program))


VIEWS_IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "t_": Tensor.t_,
    "transpose_": lambda x: x.transpose_(0, 1),
    "squeeze_": Tensor.squeeze_,
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "as_strided_": lambda x: x.as_strided_((2,), (1,)),
    "detach_": Tensor.detach_,
    "resize_ to less": lambda x: x.resize_(1),
    "resize_as_ to as much": lambda x: x.resize_as_(torch.ones(4)),
}


@pytest.mark.parametrize("name", VIEWS_IN_PLACE)
def test_a_change_of_shape_in_place_writes_no_bytes(name: str) -> None:
    """Another stream may be reading them."""

    def program() -> None:
        x = torch.ones(2, 2)
        torch.cpu.synchronize()
        on_side(x.sum)
        VIEWS_IN_PLACE[name](x)

    assert not is_racy(program)


def test_growing_a_tensor_reads_what_it_held() -> None:
    """Its bytes are copied into new memory."""

    def program() -> None:
        x = torch.ones(2)
        torch.cpu.synchronize()
        on_side(lambda: x.fill_(2.0))
        x.resize_(8)

    assert is_racy(program)


def test_a_tensor_that_grows_keeps_what_it_held() -> None:
    """Values are PyTorch's."""
    assert on_one_rank(lambda: torch.ones(2).resize_(4)[:2].tolist()) == [1.0, 1.0]


# ---------------------------------------------------------------------- composite operators

COMPOSITES: dict[str, Callable[[Tensor], object]] = {
    "to": lambda x: x.to(torch.float64),
    "contiguous": lambda x: x.t().contiguous(),
    "reshape": lambda x: x.t().reshape(-1),
    "matmul": lambda x: x @ x,
    "linear": lambda x: torch.nn.functional.linear(x, x, x[0]),
    "einsum": lambda x: torch.einsum("ij,jk->ik", x, x),
    "softmax": lambda x: x.softmax(-1),
    "layer_norm": lambda x: torch.nn.functional.layer_norm(x, (2,)),
    "cross_entropy": lambda x: torch.nn.functional.cross_entropy(x, x),
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(
        x[None], x[None], x[None]
    ),
    "chunk and cat": lambda x: torch.cat(x.chunk(2)),
    "std": lambda x: x.std(),
    "type_as": lambda x: x.type_as(torch.ones(1, dtype=torch.float64)),
}


@pytest.mark.parametrize("name", COMPOSITES)
def test_an_operator_made_of_others_is_the_same_ops_under_inference_mode(name: str) -> None:
    """It reaches the mode whole there, and what it is made of must still be seen."""

    def names(mode: Callable[[], contextlib.AbstractContextManager[object]]) -> list[str]:
        def program() -> None:
            x = torch.ones(2, 2)
            with mode():
                COMPOSITES[name](x)

        return [op.name for op in ops_of(program) if op.kind is Kind.ATEN]

    assert names(torch.inference_mode) == names(torch.no_grad)


def test_a_cast_under_inference_mode_waits_for_the_values_of_a_collective() -> None:
    """The value is that of the reduction, not what the memory held before."""

    def program(_rank: int) -> list[float]:
        x = torch.ones(2)
        with torch.inference_mode():
            dist.all_reduce(x)
            return x.to(torch.float64).tolist()

    assert fsdp_sim.simulate(program, 2, poison=True).results == [[2.0, 2.0]] * 2


# ---------------------------------------------------------------------- tensors without memory


def test_fake_and_meta_tensors_do_no_work_on_a_device() -> None:
    """They have shapes alone; PyTorch uses them beside real ones, as DTensor does."""

    def program() -> tuple[int, ...]:
        with FakeTensorMode():
            fake = torch.ones(2, 3) @ torch.ones(3, 4)
        meta = torch.ones(2, 3, device="meta") + 1
        return (*fake.shape, *meta.shape)

    assert on_one_rank(program) == (2, 4, 2, 3)
    assert not any(op.accesses for op in ops_of(program))
