"""Collectives: what each c10d operation reads, writes and computes (pure, given the tensors)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fsdp_sim.engine.patches import reduce_op_name

Values = Sequence[Sequence[Any]]
"""Per group rank: the inputs that it gave, then its extra values."""
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
        sizes: what all ranks must agree on: elements of each tensor; of an all-to-all what it sends to
            each rank, then what it receives from each.
        extra: plain values that travel with the inputs.
        result: what the handle's ``result`` gives; the outputs when None.
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
    tag: int = 0
    extra: list[Any] = field(default_factory=list)
    result: list[Tensor] | None = None
    is_host: bool = False


@dataclass(frozen=True)
class Request:
    """A call of a c10d operation.

    Attributes:
        args: its arguments by name.
        rank: the caller's rank in the group.
        size: ranks in the group.
        reduction: name of the reduce op and factor of a premultiplied sum, where the caller's options
            were seen.
    """

    args: dict[str, Any]
    rank: int
    size: int
    reduction: tuple[str, Any] | None = None


# ---------------------------------------------------------------------- reductions


def reduce(op: str, tensors: Sequence[Tensor], factors: Sequence[Any] = ()) -> Tensor:
    """Reduce in rank order: ((t0 + t1) + t2) + ...; AVG is the sum divided by the count.

    The order is part of the promise: the unsharded reference adds in the same one, bit for bit.
    """
    if op == "PREMUL_SUM":
        tensors = [tensor * factor for tensor, factor in zip(tensors, factors, strict=True)]
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
_BITWISE = ("BAND", "BOR", "BXOR")


def _reduction(request: Request, tensors: Sequence[Tensor]) -> str:
    """Return the name of the reduce op, after checking that it is defined for the tensors."""
    known = request.reduction
    op = known[0] if known is not None else reduce_op_name(request.args["reduce_op"])
    dtype = tensors[0].dtype
    if op in _BITWISE and (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(f"ReduceOp.{op} must reduce integers or booleans, got {dtype}")
    return op


def _reduced(op: str, values: Values, piece: Callable[[Sequence[Any]], Tensor]) -> Tensor:
    """Reduce one tensor of each rank; the last value of a premultiplied sum is its factor."""
    return reduce(op, [piece(v) for v in values], [v[-1] for v in values])


def _factor(op: str, request: Request) -> list[Any]:
    if op != "PREMUL_SUM":
        return []
    if request.reduction is None:
        raise NotImplementedError(
            "a premultiplied sum must be called from Python, got a call from C++"
        )
    return [request.reduction[1]]


# ---------------------------------------------------------------------- what must hold of the tensors


def _dtype(tensors: Sequence[Tensor]) -> str:
    dtypes = dict.fromkeys([tensor.dtype for tensor in tensors])
    return ",".join([str(dtype).removeprefix("torch.") for dtype in dtypes])


def _flat(lists: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [tensor for tensors in lists for tensor in tensors]


def _same_dtype(name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> str:
    dtype = _dtype(inputs)
    if outputs and inputs and _dtype(outputs) != dtype:
        raise ValueError(
            f"{name} must read and write one dtype, got {dtype} in and {_dtype(outputs)} out"
        )
    return dtype


def _demand_numel(name: str, what: str, got: int, wanted: int) -> None:
    if got != wanted:
        raise ValueError(f"{name}: {what} must have {wanted} elements, got {got}")


def _demand_length(name: str, what: str, tensors: Sequence[Tensor], size: int) -> None:
    if len(tensors) != size:
        raise ValueError(
            f"{name}: {what} must be one tensor for each of {size} ranks, got {len(tensors)}"
        )


def check_layout(name: str, tensors: Sequence[Tensor]) -> None:
    """Refuse what NCCL refuses: tensors that are sparse, not contiguous, or without memory."""
    for tensor in tensors:
        if tensor.is_meta:
            raise ValueError(f"{name}: tensors must have memory, got one on the device 'meta'")
        if tensor.layout is not torch.strided:
            raise NotImplementedError(
                f"{name} of a tensor with layout {tensor.layout} is not simulated"
            )
        if not tensor.is_contiguous() and not _is_channels_last(tensor):
            raise ValueError(
                f"{name}: tensors must be contiguous, got sizes {list(tensor.shape)} with strides "
                f"{list(tensor.stride())}; call .contiguous() first"
            )


def check_rank(what: str, rank: int, size: int) -> None:
    """Refuse the root or the peer of an operation that is no rank of its group.

    Args:
        what: what the number is, for the error.
        rank: its position in the group.
        size: ranks in the group.
    """
    if not 0 <= rank < size:
        raise ValueError(f"{what} must be a rank of the group, 0 to {size - 1}, got {rank}")


def _is_channels_last(tensor: Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    wanted = formats.get(tensor.dim())
    return wanted is not None and tensor.is_contiguous(memory_format=wanted)


# ---------------------------------------------------------------------- the collectives


def _flat_pairs(request: Request) -> list[tuple[Tensor, Tensor]]:
    """Return the input and the output of a call with flat tensors, or of each entry of a batch of it."""
    args = request.args
    if "input_tensor" in args:
        return [(args["input_tensor"], args["output_tensor"])]
    return list(zip(args["inputs"], args["outputs"], strict=True))


def all_reduce(request: Request) -> list[Meaning]:
    """Every rank gets the reduction of all ranks' tensors, in place."""
    if request.args.get("sparse_indices") is not None:
        raise NotImplementedError("all_reduce with sparse_indices is not simulated")
    return [_all_reduce(request, tensor) for tensor in request.args["tensors"]]


def _all_reduce(request: Request, tensor: Tensor) -> Meaning:
    op, size = _reduction(request, [tensor]), request.size

    def compute(values: Values) -> list[list[Tensor]]:
        return [[_reduced(op, values, lambda v: v[0].reshape(-1))]] * size

    return Meaning(
        "all_reduce",
        [tensor],
        [tensor],
        compute,
        (tensor.numel(),),
        _dtype([tensor]),
        op,
        extra=_factor(op, request),
    )


def broadcast(request: Request) -> list[Meaning]:
    """Every rank gets the root's tensors."""
    tensors, root, size = request.args["tensors"], request.args["root_rank"], request.size
    is_root = request.rank == root

    def compute(values: Values) -> list[list[Tensor]]:
        return [[] if peer == root else list(values[root]) for peer in range(size)]

    return [
        Meaning(
            "broadcast",
            tensors if is_root else [],
            [] if is_root else tensors,
            compute,
            tuple(tensor.numel() for tensor in tensors),
            _dtype(tensors),
            root=root,
            result=tensors,
        )
    ]


def all_gather_flat(request: Request) -> list[Meaning]:
    """Every rank gets all ranks' tensors, one after the other in one flat tensor."""
    return [_all_gather_flat(request, *pair) for pair in _flat_pairs(request)]


def _all_gather_flat(request: Request, source: Tensor, target: Tensor) -> Meaning:
    size = request.size
    _demand_numel("all_gather", "the output", target.numel(), size * source.numel())
    dtype = _same_dtype("all_gather", [source], [target])

    def compute(values: Values) -> list[list[Tensor]]:
        return [[torch.cat([v[0].reshape(-1) for v in values])]] * size

    return Meaning("all_gather", [source], [target], compute, (source.numel(),), dtype)


def all_gather_list(request: Request) -> list[Meaning]:
    """Every rank gets a list of all ranks' tensors; their sizes may differ."""
    args = request.args
    return [
        _all_gather_list(request, source, targets)
        for source, targets in zip(args["input_tensors"], args["output_tensors"], strict=True)
    ]


def all_gather_list_coalesced(request: Request) -> list[Meaning]:
    """Several list all-gathers as one batch; ``output_lists[r][i]`` is rank r's i-th tensor."""
    args = request.args
    _demand_length("all_gather", "output_lists", args["output_lists"], request.size)
    return [
        _all_gather_list(request, source, [targets[index] for targets in args["output_lists"]])
        for index, source in enumerate(args["input_list"])
    ]


def _all_gather_list(request: Request, source: Tensor, targets: list[Tensor]) -> Meaning:
    size = request.size
    _demand_length("all_gather", "the list of outputs", targets, size)
    _demand_numel(
        "all_gather", "the rank's own output", targets[request.rank].numel(), source.numel()
    )
    dtype = _same_dtype("all_gather", [source], targets)
    numels = [target.numel() for target in targets]
    is_even = len(set(numels)) == 1

    def compute(values: Values) -> list[list[Tensor]]:
        return [[v[0] for v in values]] * size

    sizes = (numels[0],) if is_even else tuple(numels)
    return Meaning("all_gather", [source], targets, compute, sizes, dtype)


def reduce_scatter_flat(request: Request) -> list[Meaning]:
    """Rank r gets the r-th piece of the reduction of all ranks' flat tensors."""
    return [_reduce_scatter_flat(request, *pair) for pair in _flat_pairs(request)]


def _reduce_scatter_flat(request: Request, source: Tensor, target: Tensor) -> Meaning:
    op, size = _reduction(request, [source]), request.size
    _demand_numel("reduce_scatter", "the input", source.numel(), size * target.numel())
    dtype = _same_dtype("reduce_scatter", [source], [target])

    def compute(values: Values) -> list[list[Tensor]]:
        pieces = _reduced(op, values, lambda v: v[0].reshape(-1)).chunk(size)
        return [[pieces[peer] if pieces[0].numel() else pieces[0]] for peer in range(size)]

    return Meaning(
        "reduce_scatter",
        [source],
        [target],
        compute,
        (target.numel(),),
        dtype,
        op,
        extra=_factor(op, request),
    )


def reduce_scatter_list(request: Request) -> list[Meaning]:
    """Rank r gets the reduction of all ranks' r-th tensors; their sizes may differ."""
    args = request.args
    return [
        _reduce_scatter_list(request, sources, target)
        for sources, target in zip(args["input_tensors"], args["output_tensors"], strict=True)
    ]


def _reduce_scatter_list(request: Request, sources: list[Tensor], target: Tensor) -> Meaning:
    op, size = _reduction(request, sources), request.size
    _demand_length("reduce_scatter", "the list of inputs", sources, size)
    own = sources[request.rank].numel()
    _demand_numel("reduce_scatter", "the output", target.numel(), own)
    dtype = _same_dtype("reduce_scatter", sources, [target])
    numels = [source.numel() for source in sources]
    is_even = len(set(numels)) == 1

    def compute(values: Values) -> list[list[Tensor]]:
        return [[_reduced(op, values, lambda v, peer=peer: v[peer])] for peer in range(size)]  # type: ignore[misc]

    return Meaning(
        "reduce_scatter",
        sources,
        [target],
        compute,
        (numels[0],) if is_even else tuple(numels),
        dtype,
        op,
        extra=_factor(op, request),
    )


def reduce_to_root(request: Request) -> list[Meaning]:
    """The root gets the reduction of all ranks' tensors."""
    (tensor,), root, size = request.args["tensors"], request.args["root_rank"], request.size
    op = _reduction(request, [tensor])

    def compute(values: Values) -> list[list[Tensor]]:
        reduced = [_reduced(op, values, lambda v: v[0].reshape(-1))]
        return [reduced if peer == root else [] for peer in range(size)]

    return [
        Meaning(
            "reduce",
            [tensor],
            [tensor] if request.rank == root else [],
            compute,
            (tensor.numel(),),
            _dtype([tensor]),
            op,
            root,
            extra=_factor(op, request),
            result=[tensor],
        )
    ]


def gather(request: Request) -> list[Meaning]:
    """The root gets a list of all ranks' tensors, which have one size."""
    (source,), root, size = request.args["input_tensors"], request.args["root_rank"], request.size
    targets = _flat(request.args["output_tensors"]) if request.rank == root else []
    if request.rank == root:
        _demand_length("gather", "the list of outputs", targets, size)
    for target in targets:
        _demand_numel("gather", "every output", target.numel(), source.numel())
    dtype = _same_dtype("gather", [source], targets)

    def compute(values: Values) -> list[list[Tensor]]:
        return [[v[0] for v in values] if peer == root else [] for peer in range(size)]

    return [Meaning("gather", [source], targets, compute, (source.numel(),), dtype, root=root)]


def scatter(request: Request) -> list[Meaning]:
    """Rank r gets the root's r-th tensor; all have one size."""
    (target,), root, size = request.args["output_tensors"], request.args["root_rank"], request.size
    sources = _flat(request.args["input_tensors"]) if request.rank == root else []
    if request.rank == root:
        _demand_length("scatter", "the list of inputs", sources, size)
    for source in sources:
        _demand_numel("scatter", "every input", source.numel(), target.numel())
    dtype = _same_dtype("scatter", [target], sources)

    def compute(values: Values) -> list[list[Tensor]]:
        return [[values[root][peer]] for peer in range(size)]

    return [Meaning("scatter", sources, [target], compute, (target.numel(),), dtype, root=root)]


def all_to_all_list(request: Request) -> list[Meaning]:
    """Rank r gets every rank's r-th tensor."""
    sources, targets = request.args["input_tensors"], request.args["output_tensors"]
    size = request.size
    _demand_length("all_to_all", "the list of inputs", sources, size)
    _demand_length("all_to_all", "the list of outputs", targets, size)
    dtype = _same_dtype("all_to_all", sources, targets)

    def compute(values: Values) -> list[list[Tensor]]:
        return [[values[source][peer] for source in range(size)] for peer in range(size)]

    sizes = tuple(tensor.numel() for tensor in (*sources, *targets))
    return [Meaning("all_to_all", sources, targets, compute, sizes, dtype)]


def all_to_all_single(request: Request) -> list[Meaning]:
    """Rank r gets the r-th piece of every rank's tensor, split along dim 0 as each says."""
    args, size = request.args, request.size
    source, target = args["input"], args["output"]
    sends = _splits("input", source, args["input_split_sizes"], size)
    receives = _splits("output", target, args["output_split_sizes"], size)
    dtype = _same_dtype("all_to_all", [source], [target])

    def compute(values: Values) -> list[list[Tensor]]:
        pieces = [v[0].split(v[1]) if v[0].dim() else [v[0]] for v in values]
        return [[torch.cat([piece[peer].reshape(-1) for piece in pieces])] for peer in range(size)]

    sizes = tuple(rows * _row_numel(source) for rows in sends)
    sizes += tuple(rows * _row_numel(target) for rows in receives)
    return [Meaning("all_to_all", [source], [target], compute, sizes, dtype, extra=[sends])]


def _row_numel(tensor: Tensor) -> int:
    return tensor[0].numel() if tensor.dim() and tensor.shape[0] else 1


def _splits(what: str, tensor: Tensor, splits: Sequence[int], size: int) -> list[int]:
    """Return rows per rank, after checking that they make up the tensor."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if rows % size:
            raise ValueError(
                f"all_to_all: dim 0 of the {what} must be divisible by {size} ranks, got {rows}; "
                f"give {what}_split_sizes"
            )
        return [rows // size] * size
    if len(splits) != size or sum(splits) != rows:
        raise ValueError(
            f"all_to_all: {what}_split_sizes must be {size} numbers that add up to {rows} rows, "
            f"got {list(splits)}"
        )
    return list(splits)


def barrier(request: Request) -> list[Meaning]:
    """Nobody goes on before everybody is here; the host waits."""
    size = request.size
    return [Meaning("barrier", [], [], lambda _: [[]] * size, is_host=True)]


def message(request: Request, *, is_send: bool) -> list[Meaning]:
    """The receiver gets the sender's tensors."""
    tensors = request.args["tensors"]
    return [
        Meaning(
            "send" if is_send else "recv",
            tensors if is_send else [],
            [] if is_send else tensors,
            lambda values: [[], list(values[0])],
            tuple(tensor.numel() for tensor in tensors),
            _dtype(tensors),
            tag=request.args["tag"],
            result=tensors,
        )
    ]


COLLECTIVES: dict[str, Callable[[Request], list[Meaning]]] = {
    "allreduce_": all_reduce,
    "allreduce_coalesced_": all_reduce,
    "broadcast_": broadcast,
    "_allgather_base_": all_gather_flat,
    "allgather_into_tensor_coalesced_": all_gather_flat,
    "allgather_": all_gather_list,
    "allgather_coalesced_": all_gather_list_coalesced,
    "_reduce_scatter_base_": reduce_scatter_flat,
    "reduce_scatter_tensor_coalesced_": reduce_scatter_flat,
    "reduce_scatter_": reduce_scatter_list,
    "reduce_": reduce_to_root,
    "gather_": gather,
    "scatter_": scatter,
    "alltoall_": all_to_all_list,
    "alltoall_base_": all_to_all_single,
    "barrier": barrier,
    "monitored_barrier_": barrier,
}
"""By the name of the dispatched operator, on torch 2.11 to 2.14: one meaning per entry of a batch."""
