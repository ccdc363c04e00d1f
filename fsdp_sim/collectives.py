"""Collectives: what each c10d operation reads, writes and computes (pure, given the tensors)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fsdp_sim.patches import reduce_op_name

Values = Sequence[Sequence[Any]]
"""Per group rank: the inputs that it gave."""
Compute = Callable[[Values], Sequence[Sequence[Tensor]]]
"""From all ranks' inputs to each rank's outputs."""


@dataclass
class Meaning:
    """One rank's part of a collective.

    Attributes:
        name: one canonical name per kind, on every torch version.
        inputs: tensors read.
        outputs: tensors written.
        compute: from all ranks' inputs, in group order, to all ranks' outputs.
        sizes: what all ranks must agree on: elements of each tensor, and split sizes where they match.
        extra: plain values that travel with the inputs.
        is_host: the host waits for it too (barrier).
    """

    name: str
    inputs: list[Tensor]
    outputs: list[Tensor]
    compute: Compute
    sizes: tuple[int, ...] = ()
    dtype: str = ""
    reduce_op: str | None = None
    root: int | None = None
    peer: int | None = None
    extra: list[Any] = field(default_factory=list)
    result: list[Tensor] | None = None
    is_host: bool = False


def reduce(op: str, tensors: Sequence[Tensor], factor: Any) -> Tensor:
    """Reduce in rank order: ((t0 + t1) + t2) + ...; AVG is the sum divided by the count.

    The order is part of the promise: the unsharded reference adds in the same one, bit for bit.
    """
    if op == "PREMUL_SUM":
        tensors = [tensor * factor for tensor in tensors]
    result = tensors[0].clone()
    combine = _COMBINE[op]
    for tensor in tensors[1:]:
        result = combine(result, tensor)
    if op == "AVG":
        exact = result.is_floating_point() or result.is_complex()
        result = result / len(tensors) if exact else result // len(tensors)
    return result


def _maximum(left: Tensor, right: Tensor) -> Tensor:
    return left | right if left.dtype is torch.bool else torch.maximum(left, right)


def _minimum(left: Tensor, right: Tensor) -> Tensor:
    return left & right if left.dtype is torch.bool else torch.minimum(left, right)


_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.Tensor.add_,
    "AVG": torch.Tensor.add_,
    "PREMUL_SUM": torch.Tensor.add_,
    "PRODUCT": torch.Tensor.mul_,
    "MAX": _maximum,
    "MIN": _minimum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def _sizes(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(tensor.numel() for tensor in tensors)


def _dtype(tensors: Sequence[Tensor]) -> str:
    return ",".join(dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in tensors))


def _flat(lists: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [tensor for tensors in lists for tensor in tensors]


def all_reduce(args: dict[str, Any], rank: int, size: int, factor: Any) -> Meaning:
    """Every rank gets the reduction of all ranks' tensors, in place."""
    tensors, op = args["tensors"], reduce_op_name(args["reduce_op"])

    def compute(values: Values) -> list[list[Tensor]]:
        reduced = [reduce(op, [v[i] for v in values], factor) for i in range(len(values[0]))]
        return [reduced] * size

    return Meaning(
        "all_reduce", tensors, tensors, compute, _sizes(tensors), _dtype(tensors), op
    )


def broadcast(args: dict[str, Any], rank: int, size: int, factor: Any) -> Meaning:
    """Every rank gets the root's tensors."""
    tensors, root = args["tensors"], args["root_rank"]
    is_root = rank == root

    def compute(values: Values) -> list[list[Tensor]]:
        return [[] if peer == root else list(values[root]) for peer in range(size)]

    return Meaning(
        "broadcast",
        tensors if is_root else [],
        [] if is_root else tensors,
        compute,
        _sizes(tensors),
        _dtype(tensors),
        root=root,
        result=tensors,
    )


def all_gather_single(args: dict[str, Any], rank: int, size: int, factor: Any) -> Meaning:
    """Every rank gets all ranks' tensors, one after the other in one flat tensor."""
    return _all_gather_flat([args["input_tensor"]], [args["output_tensor"]], size)


def all_gather_coalesced(args: dict[str, Any], rank: int, size: int, factor: Any) -> Meaning:
    """Several flat all-gathers as one operation."""
    return _all_gather_flat(args["inputs"], args["outputs"], size)


def _all_gather_flat(inputs: list[Tensor], outputs: list[Tensor], size: int) -> Meaning:
    def compute(values: Values) -> list[list[Tensor]]:
        count = len(values[0])
        gathered = [torch.cat([v[i].reshape(-1) for v in values]) for i in range(count)]
        return [gathered] * size

    return Meaning("all_gather", inputs, outputs, compute, _sizes(inputs), _dtype(inputs))


def all_gather_list(args: dict[str, Any], rank: int, size: int, factor: Any) -> Meaning:
    """Every rank gets a list of all ranks' tensors; their sizes may differ."""
    inputs, outputs = args["input_tensors"], _flat(args["output_tensors"])

    def compute(values: Values) -> list[list[Tensor]]:
        return [[v[i] for i in range(len(values[0])) for v in values]] * size

    return Meaning("all_gather", inputs, outputs, compute, _sizes(outputs), _dtype(inputs))


def all_gather_list_coalesced(args: dict[str, Any], rank: int, size: int, factor: Any) -> Meaning:
    """Several list all-gathers as one operation; ``output_lists[r][i]`` is rank r's i-th tensor."""
    inputs, outputs = args["input_list"], _flat(args["output_lists"])

    def compute(values: Values) -> list[list[Tensor]]:
        return [[v[i] for v in values for i in range(len(values[0]))]] * size

    return Meaning("all_gather", inputs, outputs, compute, _sizes(inputs), _dtype(inputs))


def reduce_scatter_single(args: dict[str, Any], rank: int, size: int, factor: Any) -> Meaning:
    """Rank r gets the r-th piece of the reduction of all ranks' flat tensors."""
    op = reduce_op_name(args["reduce_op"])
    return _reduce_scatter_flat([args["input_tensor"]], [args["output_tensor"]], op, size, factor)


def reduce_scatter_coalesced(args: dict[str, Any], rank: int, size: int, factor: Any) -> Meaning:
    """Several flat reduce-scatters as one operation."""
    op = reduce_op_name(args["reduce_op"])
    return _reduce_scatter_flat(args["inputs"], args["outputs"], op, size, factor)


def _reduce_scatter_flat(
    inputs: list[Tensor], outputs: list[Tensor], op: str, size: int, factor: Any
) -> Meaning:
    def compute(values: Values) -> list[list[Tensor]]:
        pieces = [
            reduce(op, [v[i].reshape(-1) for v in values], factor).chunk(size)
            for i in range(len(values[0]))
        ]
        return [[piece[peer] for piece in pieces] for peer in range(size)]

    return Meaning("reduce_scatter", inputs, outputs, compute, _sizes(outputs), _dtype(inputs), op)


def reduce_scatter_list(args: dict[str, Any], rank: int, size: int, factor: Any) -> Meaning:
    """Rank r gets the reduction of all ranks' r-th tensors; their sizes may differ."""
    op, inputs = reduce_op_name(args["reduce_op"]), _flat(args["input_tensors"])

    def compute(values: Values) -> list[list[Tensor]]:
        return [[reduce(op, [v[peer] for v in values], factor)] for peer in range(size)]

    outputs = args["output_tensors"]
    return Meaning("reduce_scatter", inputs, outputs, compute, _sizes(inputs), _dtype(inputs), op)


def reduce_to_root(args: dict[str, Any], rank: int, size: int, factor: Any) -> Meaning:
    """The root gets the reduction of all ranks' tensors."""
    tensors, root = args["tensors"], args["root_rank"]
    op = reduce_op_name(args["reduce_op"])

    def compute(values: Values) -> list[list[Tensor]]:
        reduced = [reduce(op, [v[0] for v in values], factor)]
        return [reduced if peer == root else [] for peer in range(size)]

    return Meaning(
        "reduce",
        tensors,
        tensors if rank == root else [],
        compute,
        _sizes(tensors),
        _dtype(tensors),
        op,
        root,
        result=tensors,
    )


def gather(args: dict[str, Any], rank: int, size: int, factor: Any) -> Meaning:
    """The root gets a list of all ranks' tensors."""
    inputs, root = args["input_tensors"], args["root_rank"]
    outputs = _flat(args["output_tensors"]) if rank == root else []

    def compute(values: Values) -> list[list[Tensor]]:
        return [[v[0] for v in values] if peer == root else [] for peer in range(size)]

    return Meaning(
        "gather", inputs, outputs, compute, _sizes(inputs), _dtype(inputs), root=root
    )


def scatter(args: dict[str, Any], rank: int, size: int, factor: Any) -> Meaning:
    """Rank r gets the root's r-th tensor."""
    outputs, root = args["output_tensors"], args["root_rank"]
    inputs = _flat(args["input_tensors"]) if rank == root else []

    def compute(values: Values) -> list[list[Tensor]]:
        return [[values[root][peer]] for peer in range(size)]

    return Meaning(
        "scatter", inputs, outputs, compute, _sizes(outputs), _dtype(outputs), root=root
    )


def all_to_all_list(args: dict[str, Any], rank: int, size: int, factor: Any) -> Meaning:
    """Rank r gets every rank's r-th tensor."""

    def compute(values: Values) -> list[list[Tensor]]:
        return [[values[source][peer] for source in range(size)] for peer in range(size)]

    inputs = args["input_tensors"]
    return Meaning("all_to_all", inputs, args["output_tensors"], compute, dtype=_dtype(inputs))


def all_to_all_single(args: dict[str, Any], rank: int, size: int, factor: Any) -> Meaning:
    """Rank r gets the r-th piece of every rank's tensor, split along dim 0 as each says."""
    source = args["input"]
    rows = source.shape[0] if source.dim() else 0
    splits = list(args["input_split_sizes"]) or [rows // size] * size

    def compute(values: Values) -> list[list[Tensor]]:
        pieces = [v[0].split(v[1]) for v in values]
        return [[torch.cat([piece[peer] for piece in pieces])] for peer in range(size)]

    return Meaning(
        "all_to_all", [source], [args["output"]], compute, dtype=_dtype([source]), extra=[splits]
    )


def barrier(args: dict[str, Any], rank: int, size: int, factor: Any) -> Meaning:
    """Nobody goes on before everybody is here; the host waits."""
    return Meaning("barrier", [], [], lambda _: [[]] * size, is_host=True)


COLLECTIVES: dict[str, Callable[[dict[str, Any], int, int, Any], Meaning]] = {
    "allreduce_": all_reduce,
    "allreduce_coalesced_": all_reduce,
    "broadcast_": broadcast,
    "_allgather_base_": all_gather_single,
    "allgather_into_tensor_coalesced_": all_gather_coalesced,
    "allgather_": all_gather_list,
    "allgather_coalesced_": all_gather_list_coalesced,
    "_reduce_scatter_base_": reduce_scatter_single,
    "reduce_scatter_tensor_coalesced_": reduce_scatter_coalesced,
    "reduce_scatter_": reduce_scatter_list,
    "reduce_": reduce_to_root,
    "gather_": gather,
    "scatter_": scatter,
    "alltoall_": all_to_all_list,
    "alltoall_base_": all_to_all_single,
    "barrier": barrier,
    "monitored_barrier_": barrier,
}
"""By the name of the dispatched operator, on torch 2.11 to 2.14."""
