"""Every collective of c10d moves the right values, and refuses what NCCL refuses."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._C import _dispatch_get_all_op_names as every_operator
from torch._C._distributed_c10d import _make_nccl_premul_sum
from torch.distributed.distributed_c10d import _coalescing_manager

import fsdp_sim
from fsdp_sim.engine.collectives import COLLECTIVES

W = 3
CPU = torch.device("cpu")


def mine(rank: int, count: int = 2) -> torch.Tensor:
    """Return [10 * rank, 10 * rank + 1, ...]."""
    return torch.arange(float(count)) + 10 * rank


def world() -> Any:
    """Return the default group."""
    return dist.group.WORLD


def clean(program: Callable[[int], Any], world_size: int = W) -> list[Any]:
    """Run a program that must give no finding, on outputs that are NaN until they are complete."""
    return fsdp_sim.simulate(program, world_size, poison=True).results


def quiet(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call what some supported version of PyTorch deprecates."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)


# ---------------------------------------------------------------------- one collective each


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (dist.ReduceOp.SUM, 9.0),
        (dist.ReduceOp.AVG, 3.0),
        (dist.ReduceOp.PRODUCT, 24.0),
        (dist.ReduceOp.MIN, 2.0),
        (dist.ReduceOp.MAX, 4.0),
    ],
)
def test_all_reduce_reduces(op: Any, expected: float, is_async: bool) -> None:
    """Values 2, 3 and 4 on three ranks, synchronous and not."""

    def program(rank: int) -> float:
        value = torch.tensor([float(rank + 2)])
        work = dist.all_reduce(value, op, async_op=is_async)
        if is_async:
            work.wait()
        return value.item()

    assert [expected] * W == clean(program)


@pytest.mark.parametrize(
    ("op", "expected"), [(dist.ReduceOp.BAND, 4), (dist.ReduceOp.BOR, 7), (dist.ReduceOp.BXOR, 7)]
)
def test_bitwise_all_reduce_takes_integers(op: Any, expected: int) -> None:
    """Values 5, 6 and 4."""

    def program(rank: int) -> float:
        value = torch.tensor([(5, 6, 4)[rank]])
        dist.all_reduce(value, op)
        return value.item()

    assert [expected] * W == clean(program)


def test_a_bitwise_all_reduce_of_floats_is_refused() -> None:
    """As gloo and NCCL refuse it."""

    def program(rank: int) -> None:
        dist.all_reduce(torch.ones(1), dist.ReduceOp.BAND)

    message = r"^ReduceOp\.BAND must reduce integers or booleans, got torch\.float32\n"
    with pytest.raises(ValueError, match=message):
        fsdp_sim.simulate(program, W)


def test_integers_are_averaged_towards_zero() -> None:
    """1 + 2 + 4 = 7, over three."""

    def program(rank: int) -> float:
        value = torch.tensor([2**rank])
        dist.all_reduce(value, dist.ReduceOp.AVG)
        return value.item()

    assert clean(program) == [2] * W


def test_booleans_are_reduced() -> None:
    """MAX is or, MIN is and."""

    def program(rank: int) -> list[bool]:
        some, every = torch.tensor([rank == 1]), torch.tensor([rank != 1])
        dist.all_reduce(some, dist.ReduceOp.MAX)
        dist.all_reduce(every, dist.ReduceOp.MIN)
        return [bool(some), bool(every)]

    assert clean(program) == [[True, False]] * W


@pytest.mark.parametrize("make", [float, lambda factor: torch.tensor([factor])])
def test_a_premultiplied_sum_takes_each_ranks_own_factor(make: Callable[[float], Any]) -> None:
    """1 * 2 + 2 * 3 + 3 * 4, the factor a number or a tensor; the next sum has none."""

    def program(rank: int) -> list[float]:
        scaled, plain = torch.tensor([rank + 1.0]), torch.tensor([rank + 1.0])
        dist.all_reduce(scaled, _make_nccl_premul_sum(make(rank + 2.0)))
        dist.all_reduce(plain)
        return [scaled.item(), plain.item()]

    assert clean(program) == [[20.0, 6.0]] * W


def test_a_premultiplied_sum_is_scattered() -> None:
    """Rank r gets element r of 2 * (sum of all)."""

    def program(rank: int) -> float:
        out = torch.empty(1)
        op = _make_nccl_premul_sum(2.0)
        quiet(dist.reduce_scatter_tensor, out, mine(rank, W), op)
        return out.item()

    assert clean(program) == [60.0, 66.0, 72.0]


def test_reduction_adds_in_rank_order() -> None:
    """(1 + 2**-24) + 2**-24 loses both small summands in fp32; small ones first would keep them."""

    def program(rank: int) -> float:
        value = torch.tensor([1.0 if rank == 0 else 2.0**-24])
        dist.all_reduce(value)
        return value.item()

    assert clean(program) == [1.0] * W


def test_broadcast_sends_the_roots_tensor() -> None:
    """From rank 1."""

    def program(rank: int) -> list[float]:
        value = mine(rank)
        dist.broadcast(value, 1)
        return value.tolist()

    assert clean(program) == [[10.0, 11.0]] * W


def test_reduce_changes_the_root_alone() -> None:
    """To rank 2."""

    def program(rank: int) -> float:
        value = torch.tensor([rank + 1.0])
        dist.reduce(value, 2)
        return value.item()

    assert clean(program) == [1.0, 2.0, 6.0]


def test_all_gather_fills_a_list() -> None:
    """One tensor a rank, in rank order."""

    def program(rank: int) -> list[list[float]]:
        out = [torch.empty(2) for _ in range(W)]
        dist.all_gather(out, mine(rank))
        return [each.tolist() for each in out]

    assert clean(program) == [[[0.0, 1.0], [10.0, 11.0], [20.0, 21.0]]] * W


def test_all_gather_takes_uneven_lists() -> None:
    """Rank r gives r + 1 elements: NCCL can, gloo cannot."""

    def program(rank: int) -> list[list[float]]:
        out = [torch.empty(each + 1) for each in range(W)]
        dist.all_gather(out, mine(rank, rank + 1))
        return [each.tolist() for each in out]

    assert clean(program) == [[[0.0], [10.0, 11.0], [20.0, 21.0, 22.0]]] * W


def test_all_gather_fills_one_tensor() -> None:
    """Flat, or with a dimension more."""

    def program(rank: int) -> list[Any]:
        flat, stacked = torch.empty(2 * W), torch.empty(W, 2)
        quiet(dist.all_gather_into_tensor, flat, mine(rank))
        quiet(dist.all_gather_into_tensor, stacked, mine(rank))
        return [flat.tolist(), stacked.tolist()]

    flat = [0.0, 1.0, 10.0, 11.0, 20.0, 21.0]
    assert [[flat, [flat[:2], flat[2:4], flat[4:]]]] * W == clean(program)


def test_all_gather_in_place_reads_its_slice_of_the_output() -> None:
    """As FSDP gathers: the input is the rank's slice."""

    def program(rank: int) -> list[float]:
        out = torch.zeros(2 * W)
        out[2 * rank : 2 * rank + 2] = mine(rank)
        quiet(dist.all_gather_into_tensor, out, out[2 * rank : 2 * rank + 2])
        return out.tolist()

    assert fsdp_sim.simulate(program, W).results == [[0.0, 1.0, 10.0, 11.0, 20.0, 21.0]] * W


def test_reduce_scatter_takes_a_tensor() -> None:
    """Rank r gets the r-th third of the sum."""

    def program(rank: int) -> list[float]:
        out = torch.empty(2)
        quiet(dist.reduce_scatter_tensor, out, mine(rank, 2 * W))
        return out.tolist()

    assert clean(program) == [[30.0, 33.0], [36.0, 39.0], [42.0, 45.0]]


def test_reduce_scatter_takes_lists() -> None:
    """Even and uneven: rank r gets the sum of all ranks' r-th tensors."""

    def program(rank: int) -> list[list[float]]:
        even, uneven = torch.empty(1), torch.empty(rank + 1)
        dist.reduce_scatter(even, [torch.tensor([10.0 * rank + each]) for each in range(W)])
        dist.reduce_scatter(uneven, [mine(rank, each + 1) for each in range(W)])
        return [even.tolist(), uneven.tolist()]

    expected = [[[30.0], [30.0]], [[33.0], [30.0, 33.0]], [[36.0], [30.0, 33.0, 36.0]]]
    assert expected == clean(program)


def test_gather_and_scatter_have_a_root() -> None:
    """Gather at rank 1, scatter from rank 2."""

    def program(rank: int) -> Any:
        out = [torch.empty(1) for _ in range(W)] if rank == 1 else None
        dist.gather(torch.tensor([float(rank)]), out, 1)
        got = torch.empty(1)
        dist.scatter(
            got, [torch.tensor([5.0 + each]) for each in range(W)] if rank == 2 else None, 2
        )
        return [each.item() for each in out] if out else [], got.item()

    assert clean(program) == [([], 5.0), ([0.0, 1.0, 2.0], 6.0), ([], 7.0)]


def test_all_to_all_swaps_pieces() -> None:
    """Even pieces of one tensor, uneven pieces, and a list."""

    def program(rank: int) -> list[Any]:
        even, listed = torch.empty(W), [torch.empty(1) for _ in range(W)]
        dist.all_to_all_single(even, mine(rank, W))
        sends = [1, 2, 0]
        uneven = torch.empty(W * sends[rank], 1)
        dist.all_to_all_single(uneven, mine(rank, W)[:, None], [sends[rank]] * W, sends)
        dist.all_to_all(listed, list(mine(rank, W).split(1)))
        return [even.tolist(), uneven.flatten().tolist(), [each.item() for each in listed]]

    columns = [[0.0, 10.0, 20.0], [1.0, 11.0, 21.0], [2.0, 12.0, 22.0]]
    uneven = [[0.0, 10.0, 20.0], [1.0, 2.0, 11.0, 12.0, 21.0, 22.0], []]
    assert [[c, u, c] for c, u in zip(columns, uneven)] == clean(program)


def test_barriers_let_everybody_go_on() -> None:
    """Plain, asynchronous and monitored."""

    def program(rank: int) -> int:
        dist.barrier()
        dist.barrier(async_op=True).wait()
        dist.monitored_barrier()
        return rank

    assert clean(program) == [0, 1, 2]


def test_objects_travel() -> None:
    """All-gather, gather, broadcast, scatter, send and receive of Python objects."""

    def program(rank: int) -> Any:
        everything: list[Any] = [None] * W
        dist.all_gather_object(everything, {"rank": rank})
        at_root: list[Any] | None = [None] * W if rank == 0 else None
        dist.gather_object(rank, at_root)
        given = ["from", rank]
        dist.broadcast_object_list(given, 1)
        got: list[Any] = [None]
        dist.scatter_object_list(got, [f"to {each}" for each in range(W)] if rank == 2 else None, 2)
        sent = [rank * 1.5]
        if rank == 0:
            dist.send_object_list(sent, 1)
        elif rank == 1:
            dist.recv_object_list(sent, 0)
        return everything, at_root, given, got, sent

    everything = [{"rank": rank} for rank in range(W)]
    assert [
        (everything, [0, 1, 2], ["from", 1], ["to 0"], [0.0]),
        (everything, None, ["from", 1], ["to 1"], [0.0]),
        (everything, None, ["from", 1], ["to 2"], [3.0]),
    ] == clean(program)


# ---------------------------------------------------------------------- coalescing


@pytest.mark.parametrize("is_async", [False, True])
def test_a_coalescing_manager_reduces_several_tensors(is_async: bool) -> None:
    """Two all-reduces as one device op."""

    def program(rank: int) -> list[float]:
        one, two = torch.tensor([float(rank)]), torch.tensor([1.0, 2.0])
        with _coalescing_manager(async_ops=is_async) as manager:
            dist.all_reduce(one)
            dist.all_reduce(two)
        if is_async:
            manager.wait()
        return [*one.tolist(), *two.tolist()]

    assert clean(program) == [[3.0, 3.0, 6.0]] * W


def test_a_coalescing_manager_gathers_and_scatters() -> None:
    """All-gathers as one batch, reduce-scatters as another."""

    def program(rank: int) -> list[Any]:
        outs = [torch.empty(W), torch.empty(2 * W)]
        pieces = [torch.empty(1), torch.empty(2)]
        with _coalescing_manager():
            for out, count in zip(outs, (1, 2)):
                quiet(dist.all_gather_into_tensor, out, mine(rank, count))
        with _coalescing_manager():
            for piece, count in zip(pieces, (1, 2)):
                quiet(dist.reduce_scatter_tensor, piece, mine(rank, count * W))
        return [each.tolist() for each in (*outs, *pieces)]

    gathered = [[0.0, 10.0, 20.0], [0.0, 1.0, 10.0, 11.0, 20.0, 21.0]]
    scattered = [[[30.0], [30.0, 33.0]], [[33.0], [36.0, 39.0]], [[36.0], [42.0, 45.0]]]
    assert [gathered + each for each in scattered] == clean(program)


def test_a_manager_with_a_device_takes_any_collective() -> None:
    """A broadcast and an asynchronous reduce, issued at the manager's end."""

    def program(rank: int) -> list[float]:
        one, two = mine(rank, 1), mine(rank, 1)
        with _coalescing_manager(device=CPU, async_ops=True) as manager:
            dist.broadcast(one, 2)
            dist.reduce(two, 0, async_op=True)
        manager.wait()
        return [one.item(), two.item()]

    assert clean(program) == [[20.0, 30.0], [20.0, 10.0], [20.0, 20.0]]


def test_entries_of_a_batch_are_ops_of_their_own_under_one_batch() -> None:
    """Each has a sequence number and sizes of its own (B68)."""

    def program(rank: int) -> None:
        with _coalescing_manager():
            dist.all_reduce(torch.ones(2))
            dist.all_reduce(torch.ones(3))
        dist.all_reduce(torch.ones(4))

    report = fsdp_sim.simulate(program, 2, trace=True)
    calls = [op.call for op in report.trace.ops if op.rank == 0 and op.call is not None]

    assert [(call.sequence, call.sizes, call.batch) for call in calls] == [
        (0, (2,), 0),
        (1, (3,), 0),
        (2, (4,), None),
    ]


def test_a_batch_on_one_rank_matches_single_calls_on_another() -> None:
    """NCCL's groups are a matter of one rank."""

    def program(rank: int) -> list[float]:
        one, two = torch.ones(2), torch.ones(3)
        if rank == 0:
            with _coalescing_manager():
                dist.all_reduce(one)
                dist.all_reduce(two)
        else:
            dist.all_reduce(one)
            dist.all_reduce(two)
        return [one.sum().item(), two.sum().item()]

    assert clean(program, 2) == [[4.0, 6.0]] * 2


# ---------------------------------------------------------------------- functional collectives


def test_functional_collectives_give_values() -> None:
    """All-reduce, all-gather, reduce-scatter, broadcast and all-to-all."""

    def program(rank: int) -> list[Any]:
        group = world()
        results = [
            funcol.all_reduce(mine(rank), "sum", group),
            quiet(funcol.all_gather_tensor, mine(rank), 0, group),
            quiet(funcol.reduce_scatter_tensor, mine(rank, W), "sum", 0, group),
            funcol.broadcast(mine(rank), 1, group),
            funcol.all_to_all_single(mine(rank, W), None, None, group),
        ]
        return [(each + 0).tolist() for each in results]

    first = [[30.0, 33.0], [0.0, 1.0, 10.0, 11.0, 20.0, 21.0]]
    columns = [[0.0, 10.0, 20.0], [1.0, 11.0, 21.0], [2.0, 12.0, 22.0]]
    assert [[*first, [30.0 + 3 * rank], [10.0, 11.0], columns[rank]] for rank in range(W)] == clean(
        program
    )


FUNCTIONAL: dict[str, tuple[Callable[[Any, int], Any], Callable[[int], list[Any]]]] = {
    "all_reduce_": (
        lambda ops, rank: ops.all_reduce_(mine(rank), "max", "0"),
        lambda rank: [[20.0, 21.0]],
    ),
    "all_reduce_coalesced": (
        lambda ops, rank: ops.all_reduce_coalesced([mine(rank), mine(rank, 1)], "sum", "0"),
        lambda rank: [[30.0, 33.0], [30.0]],
    ),
    "all_reduce_coalesced_": (
        lambda ops, rank: ops.all_reduce_coalesced_([mine(rank), mine(rank, 1)], "sum", "0"),
        lambda rank: [[30.0, 33.0], [30.0]],
    ),
    "all_gather_into_tensor_coalesced": (
        lambda ops, rank: ops.all_gather_into_tensor_coalesced([mine(rank, 1)] * 2, W, "0"),
        lambda rank: [[0.0, 10.0, 20.0]] * 2,
    ),
    "all_gather_into_tensor_out": (
        lambda ops, rank: ops.all_gather_into_tensor_out(mine(rank, 1), W, "0", out=torch.empty(W)),
        lambda rank: [[0.0, 10.0, 20.0]],
    ),
    "reduce_scatter_tensor_coalesced": (
        lambda ops, rank: ops.reduce_scatter_tensor_coalesced([mine(rank, W)], "sum", W, "0"),
        lambda rank: [[30.0 + 3 * rank]],
    ),
    "broadcast_": (
        lambda ops, rank: ops.broadcast_(mine(rank), 1, "0"),
        lambda rank: [[10.0, 11.0]],
    ),
    "batch_p2p_ops": (
        lambda ops, rank: ops.batch_p2p_ops(
            ["isend", "irecv"],
            [(rank + 1) % W, (rank - 1) % W],
            [0, 0],
            [mine(rank, 1), torch.zeros(1)],
            "0",
        ),
        lambda rank: [[], [10.0 * ((rank - 1) % W)]],
    ),
}
"""By operator: a call, and what each rank must get."""


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_operators_of_functional_collectives_give_values(name: str) -> None:
    """Those that compiled code calls; ``wait_tensor`` joins each result."""
    operators = torch.ops._c10d_functional
    if not hasattr(operators, name):
        pytest.skip(f"this version of PyTorch has no {name}")
    call, expected = FUNCTIONAL[name]

    def program(rank: int) -> list[Any]:
        out = call(operators, rank)
        results = out if isinstance(out, (list, tuple)) else [out]
        return [operators.wait_tensor(each).tolist() for each in results]

    assert clean(program) == [expected(rank) for rank in range(W)]


def test_shards_change_their_dim() -> None:
    """DTensor's own all-to-all: rows on each rank become columns."""

    def program(rank: int) -> list[float]:
        rows = mine(rank, W)[None, :]
        columns = torch.ops._dtensor.shard_dim_alltoall(rows, 0, 1, "0")
        return (columns + 0).flatten().tolist()

    assert clean(program) == [[0.0, 10.0, 20.0], [1.0, 11.0, 21.0], [2.0, 12.0, 22.0]]


def test_every_operator_of_c10d_is_simulated_or_refused() -> None:
    """One that a new version of PyTorch brings must be looked at."""
    names = {name.removeprefix("c10d::") for name in every_operator() if name.startswith("c10d::")}
    elsewhere = {"send", "recv_"}
    refused = {"recv_any_source_", "check_for_nan"}

    assert names - set(COLLECTIVES) - elsewhere <= refused


def test_functional_collectives_that_are_waited_for_out_of_order_are_clean() -> None:
    """Each result waits for its own collective, whichever was issued last."""

    def program(rank: int) -> list[float]:
        group = world()
        results = [funcol.all_reduce(mine(rank) + each, "sum", group) for each in range(3)]
        return [(each * 1).sum().item() for each in reversed(results)]

    assert clean(program) == [[75.0, 69.0, 63.0]] * W


def test_a_functional_result_used_without_its_wait_is_a_race() -> None:
    """``wait_tensor`` is what orders the current stream after the collective."""

    def program(rank: int) -> float:
        result = torch.ops._c10d_functional.all_reduce(mine(rank), "sum", "0")
        return (result * 2).sum().item()

    with pytest.raises(fsdp_sim.Race):
        fsdp_sim.simulate(program, W)


def test_waiting_for_one_functional_result_does_not_order_another() -> None:
    """Two groups have two streams: the wait of the first is none of the second."""

    def program(rank: int) -> float:
        other = dist.new_group([0, 1])
        first = torch.ops._c10d_functional.all_reduce(mine(rank), "sum", "0")
        second = torch.ops._c10d_functional.all_reduce(mine(rank), "sum", other.group_name)
        torch.ops._c10d_functional.wait_tensor(first)
        return (second * 2).sum().item()

    with pytest.raises(fsdp_sim.Race):
        fsdp_sim.simulate(program, 2)


def test_functional_collectives_have_gradients() -> None:
    """The gradient of an all-to-all is the all-to-all of the gradients."""

    def program(rank: int) -> list[float]:
        source = mine(rank, W).requires_grad_()
        out = funcol.all_to_all_single_autograd(source, None, None, world())
        (funcol.wait_tensor(out) * (rank + 1.0)).sum().backward()
        assert source.grad is not None
        return source.grad.tolist()

    assert clean(program) == [[1.0, 2.0, 3.0]] * W


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: quiet(dist.all_gather_into_tensor, torch.empty(5), torch.ones(2)),
            "all_gather: the output must have 4 elements, got 5",
        ),
        (
            lambda: quiet(dist.reduce_scatter_tensor, torch.empty(2), torch.ones(5)),
            "reduce_scatter: the input must have 4 elements, got 5",
        ),
        (
            lambda: dist.all_gather([torch.empty(1)] * 2, torch.ones(2)),
            "all_gather: the rank's own output must have 2 elements, got 1",
        ),
        (
            lambda: dist.all_to_all_single(torch.empty(2), torch.ones(3)),
            (
                "all_to_all: dim 0 of the input must be divisible by 2 ranks, got 3; "
                "give input_split_sizes"
            ),
        ),
        (
            lambda: dist.all_to_all_single(torch.empty(2), torch.ones(3), [1, 1], [1, 1]),
            "all_to_all: input_split_sizes must be 2 numbers that add up to 3 rows, got [1, 1]",
        ),
        (
            lambda: dist.broadcast(torch.ones(1), 5),
            "broadcast: the root must be a rank of the group, 0 to 1, got 5",
        ),
        (
            lambda: dist.send(torch.ones(1), 7),
            "send: dst must be a rank of the group, 0 to 1, got 7",
        ),
        (
            lambda: dist.recv(torch.ones(1), 7),
            "recv: src must be a rank of the group, 0 to 1, got 7",
        ),
        (
            lambda: dist.all_reduce(torch.ones(1, device="meta")),
            "all_reduce: tensors must have memory, got one on the device 'meta'",
        ),
        (
            lambda: dist.all_reduce(torch.ones(2, 3).t()),
            (
                "all_reduce: tensors must be contiguous, got sizes [3, 2] with strides [1, 3]; "
                "call .contiguous() first"
            ),
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_where_they_are_given(
    call: Callable[[], Any], message: str
) -> None:
    """The rank that gives them gets the error, before anything is issued."""

    def program(rank: int) -> str:
        with pytest.raises(ValueError) as caught:  # noqa: PT011  the whole message is compared
            call()
        return str(caught.value)

    assert [message] * 2 == fsdp_sim.simulate(program, 2).results


def test_a_sparse_tensor_is_refused() -> None:
    """Not simulated, and said so."""

    def program(rank: int) -> None:
        dist.all_reduce(torch.ones(2, 2).to_sparse())

    with pytest.raises(NotImplementedError, match=r"^all_reduce of a tensor with layout"):
        fsdp_sim.simulate(program, 2)
