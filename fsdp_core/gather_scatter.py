"""Whole tensors at their owners: packed point-to-point gathers and scatters of row shards."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_core.errors import StateError
from fsdp_core.owner_planning import OwnerPlan, Parcel, Part


def gather_to_owners(
    plan: OwnerPlan, sources: Mapping[int, Tensor], process_group: dist.ProcessGroup | None = None
) -> dict[int, Tensor]:
    """Bring each tensor together on its owner.

    One message goes from each holder to each owner that needs something of it, all in one batch;
    a rank with nothing to send or receive makes no call.

    Args:
        plan: this rank's.
        sources: this rank's rows of each tensor of which it holds some.
        process_group: one that has all holders; None is the default group.

    Shapes:
        sources: [rows held, *trailing dims]; results: the whole shape.

    Ordering:
        Requires that the current stream is behind the writes of the sources. The results are
        complete on the current stream. On NCCL the first point-to-point of a communicator needs
        all its ranks, so issue any collective on it before.

    Returns:
        The whole tensors that this rank owns, by index.

    Raises:
        StateError: a source that the plan needs is missing or has another number of elements.
    """
    _check_parts("source", plan, sources)
    flats = {index: sources[index].detach().reshape(-1) for index in plan.held}
    outgoing = [_pack(parcel, flats, plan.held) for parcel in plan.to_owners]
    like = next(iter(flats.values()), None)
    incoming = [_new_message(parcel, like) for parcel in plan.from_holders]
    _exchange(plan.to_owners, outgoing, plan.from_holders, incoming, process_group)
    wholes = {index: flats[index].new_empty(_numel(plan, index)) for index in plan.owned}
    for index in plan.owned:
        _place(wholes[index], plan.held[index], flats[index])
    for parcel, message in zip(plan.from_holders, incoming, strict=True):
        for part, elements in _split(parcel, message):
            _place(wholes[part.index], part, elements)
    return {index: whole.view(plan.shapes[index]) for index, whole in wholes.items()}


def scatter_from_owners(
    plan: OwnerPlan,
    wholes: Mapping[int, Tensor],
    destinations: Mapping[int, Tensor],
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Bring each owner's tensor back to its holders, in place.

    Args:
        plan: this rank's; the one of the gather.
        wholes: the whole tensors that this rank owns.
        destinations: where this rank's rows of each tensor go.
        process_group: as in `gather_to_owners`.

    Shapes:
        wholes: the whole shape; destinations: [rows held, *trailing dims], contiguous.

    Ordering:
        As in `gather_to_owners`.

    Raises:
        StateError: a tensor or destination that the plan needs is missing or has another number
            of elements.
    """
    _check_parts("destination", plan, destinations)
    _check_wholes(plan, wholes)
    flats = {index: wholes[index].detach().reshape(-1) for index in plan.owned}
    targets = {index: destinations[index].detach().view(-1) for index in plan.held}
    whole_parts = {index: Part(index, 0, _numel(plan, index)) for index in plan.owned}
    outgoing = [_pack(parcel, flats, whole_parts) for parcel in plan.from_holders]
    like = next(iter(targets.values()), None)
    incoming = [_new_message(parcel, like) for parcel in plan.to_owners]
    _exchange(plan.from_holders, outgoing, plan.to_owners, incoming, process_group)
    for index in plan.owned:
        part = plan.held[index]
        targets[index].copy_(flats[index].narrow(0, part.start, part.numel))
    for parcel, message in zip(plan.to_owners, incoming, strict=True):
        for part, elements in _split(parcel, message):
            targets[part.index].copy_(elements)


def _exchange(
    send_parcels: Sequence[Parcel],
    outgoing: Sequence[Tensor],
    receive_parcels: Sequence[Parcel],
    incoming: Sequence[Tensor],
    process_group: dist.ProcessGroup | None,
) -> None:
    """Send and receive all messages in one batch, and join it to the current stream."""
    operations = [
        dist.P2POp(dist.isend, message, parcel.peer, process_group)
        for parcel, message in zip(send_parcels, outgoing, strict=True)
    ]
    operations += [
        dist.P2POp(dist.irecv, message, parcel.peer, process_group)
        for parcel, message in zip(receive_parcels, incoming, strict=True)
    ]
    if not operations:
        return
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _pack(parcel: Parcel, flats: Mapping[int, Tensor], held: Mapping[int, Part]) -> Tensor:
    """Concatenate a parcel's parts, cut out of flat tensors that hold the parts `held`."""
    return torch.cat(
        [
            flats[part.index].narrow(0, part.start - held[part.index].start, part.numel)
            for part in parcel.parts
        ]
    )


def _new_message(parcel: Parcel, like: Tensor | None) -> Tensor:
    assert like is not None, "an owner holds a part of what it owns"
    return like.new_empty(parcel.numel)


def _split(parcel: Parcel, message: Tensor) -> list[tuple[Part, Tensor]]:
    """Pair each part of a received parcel with its elements."""
    pieces = message.split([part.numel for part in parcel.parts])
    return list(zip(parcel.parts, pieces, strict=True))


def _place(whole: Tensor, part: Part, elements: Tensor) -> None:
    whole.narrow(0, part.start, part.numel).copy_(elements)


def _numel(plan: OwnerPlan, index: int) -> int:
    return torch.Size(plan.shapes[index]).numel()


def _check_parts(role: str, plan: OwnerPlan, tensors: Mapping[int, Tensor]) -> None:
    for index, part in plan.held.items():
        _check_numel(role, index, part.numel, tensors.get(index))


def _check_wholes(plan: OwnerPlan, wholes: Mapping[int, Tensor]) -> None:
    for index in plan.owned:
        _check_numel("whole tensor", index, _numel(plan, index), wholes.get(index))


def _check_numel(role: str, index: int, numel: int, tensor: Tensor | None) -> None:
    if tensor is None or tensor.numel() != numel:
        got = "none" if tensor is None else f"{tensor.numel()}"
        msg = (
            f"the {role} of tensor {index} must have {numel} elements, got {got}; pass one made for "
            f"this plan"
        )
        raise StateError(msg)
