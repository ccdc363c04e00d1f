"""Dispatch: every ATen and c10d call of a rank becomes an op with its reads and writes."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_sim.engine import deferral, host_reads, patches, process_group
from fsdp_sim.engine.machine import Machine, caller
from fsdp_sim.engine.memory import StorageRecord
from fsdp_sim.engine.tensors import access_of
from fsdp_sim.op import Access, Kind

VIEWS = frozenset(
    (
        "_unsafe_view",
        "unsafe_split",
        "unsafe_split_with_sizes",
        "unsafe_chunk",
        "set_",
        "lift_fresh",
        "detach",
        "alias",
        "_reshape_alias",
        "as_strided_",
        "squeeze_",
        "swapaxes_",
        "swapdims_",
        "t_",
        "transpose_",
        "unsqueeze_",
        "detach_",
    )
)
"""Operators that move no bytes although their schema says that they write, or not that they return a view."""

HIDDEN_WRITES: dict[str, tuple[str, ...]] = {
    "native_batch_norm": ("running_mean", "running_var"),
    "_native_batch_norm_legit": ("running_mean", "running_var"),
    "mkldnn_rnn_layer_backward": ("workspace",),
    "all_gather_copy_in": ("all_gather_output",),
}
"""Arguments that an operator writes although its schema does not say so (found by the self-audit)."""

HIDDEN_ALIASES = frozenset(("all_gather_copy_in",))
"""Operators that compute, and whose results are on memory of an argument that they have written,
although their schema does not say so."""

FACTORIES_WITHOUT_VALUES = frozenset(
    ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
)

NEEDS_NO_MEMORY = FACTORIES_WITHOUT_VALUES | {
    *(f"{values}_like" for values in ("zeros", "ones", "full", "rand", "randn", "randint")),
    *(f"new_{values}" for values in ("zeros", "ones", "full")),
}
"""Operators that look at an argument's shape and type alone."""

# Looking a member up on its enum costs 90 ns in Python 3.11, and this is for every operator.
_ATEN = Kind.ATEN

Handler = Callable[["RankMode", "Operator", Any, Any, Any], Any]


@dataclass(frozen=True, slots=True)
class Operator:
    """What is known of an operator from its schema.

    Attributes:
        name: the name in ops, with the overload unless it is the default.
        places: positions of the arguments that may hold tensors, and whether each is written.
        writes: for each argument by name, whether it is written; None where it holds no tensor.
        handle: what the mode does with a call.
        run: runs it.
        returns_new: some of its results may be on new memory.
        needs_memory: it looks at more of its arguments than their shape and type.
        waits_first: it waits for its stream, which covers the values that it needs.
        can_defer: its outputs' shapes do not depend on values, so it can be run later.
    """

    name: str
    places: tuple[tuple[int, bool], ...]
    writes: dict[str, bool | None]
    handle: Handler
    run: Callable[..., Any]
    returns_new: bool = True
    needs_memory: bool = True
    waits_first: bool = False
    can_defer: bool = False


class RankMode(patches.CompilableMode):
    """The dispatch mode of one rank's thread."""

    supports_higher_order_operators = True

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    @patches.never_compiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer one call."""
        if types and patches.is_python_subclass(types):
            if patches.FakeTensor in types:
                return func(*args, **(kwargs or {}))
            return NotImplemented
        operator = _OPERATORS.get(id(func))
        if operator is None:
            operator = operator_of(func)
        return operator.handle(self, operator, func, args, kwargs or {})


class HostMode(TorchDispatchMode):
    """Inside it a rank computes on its host: what operators return is the host's."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.machine = machine

    @patches.never_compiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer one call."""
        if func.namespace != "aten" or patches.is_python_subclass(types):
            return func(*args, **(kwargs or {}))
        with patches.below_dispatch():
            return run_on_host(self.machine, func, args, kwargs or {})


_OPERATORS: dict[int, Operator] = {}
"""By identity: operators live as long as PyTorch, and their own hash is slow Python."""


def operator_of(func: Any) -> Operator:
    """Return what is known of an operator; found out once."""
    operator = _OPERATORS.get(id(func))
    if operator is None:
        operator = _OPERATORS[id(func)] = classify(func)
    return operator


def moves_nothing(func: Any) -> bool:
    """Whether an operator is believed to touch no bytes: its results look at its arguments'."""
    return operator_of(func).handle is _run_untouched


def is_made_of_others(func: Any) -> bool:
    """Whether an operator runs under the mode itself, so that those that it is made of are seen."""
    return operator_of(func).handle in (_run_higher_order, _run_functional, _run_parts)


def classify(func: Any) -> Operator:
    """Return what is known of an operator."""
    if patches.is_higher_order(func):
        return Operator(func.name(), (), {}, _run_higher_order, func)
    schema = patches.schema_of(func)
    hidden = HIDDEN_WRITES.get(schema.name, ())
    writes = {name: True if name in hidden else write for name, write in schema.writes.items()}
    handle = _handler_of(func, schema, writes)
    return Operator(
        schema.full_name,
        tuple((place, write) for place, write in enumerate(writes.values()) if write is not None),
        writes,
        handle,
        patches.runner_of(func),
        returns_new=schema.returns_new,
        needs_memory=schema.name not in NEEDS_NO_MEMORY,
        waits_first=handle in (_run_host_read, _run_sized_by_values),
        can_defer=handle in (_run_op, _run_copy, _run_indexing) and patches.is_foreseeable(func),
    )


def _handler_of(func: Any, schema: patches.Schema, writes: dict[str, bool | None]) -> Handler:
    name = schema.name
    if schema.namespace == "c10d":
        return _run_collective
    if schema.namespace in ("_c10d_functional", "_c10d_functional_autograd", "_dtensor"):
        return _run_untouched if name.startswith(("wait_tensor", "_wrap")) else _run_functional
    special = _SPECIAL.get(schema.full_name) or _SPECIAL.get(name)
    if special is not None:
        return special
    if patches.is_composite(func):
        return _run_parts
    moves_nothing = schema.returns_alias and not any(writes.values())
    if moves_nothing or name in VIEWS or schema.namespace == "profiler":
        return _run_untouched
    return _run_op


# ---------------------------------------------------------------------- handlers


def _run_untouched(mode: RankMode, operator: Operator, func: Any, args: Any, kwargs: Any) -> Any:
    return operator.run(*args, **kwargs)


def _run_parts(mode: RankMode, operator: Operator, func: Any, args: Any, kwargs: Any) -> Any:
    """An operator made of others arrives whole below autograd, as under ``torch.inference_mode``."""
    with mode:
        return func.decompose(*args, **kwargs)


def _run_lift(mode: RankMode, operator: Operator, func: Any, args: Any, kwargs: Any) -> Any:
    """``torch.tensor(data)``: the host's, unless it was asked for on a device."""
    out = func(*args, **kwargs)
    mode.machine.memory.born(out, is_host=not mode.machine.makes_device_tensor)
    return out


def _run_higher_order(mode: RankMode, operator: Operator, func: Any, args: Any, kwargs: Any) -> Any:
    kernel = patches.higher_order_kernel(func)
    with mode:
        return kernel(*args, **kwargs)


def _run_collective(mode: RankMode, operator: Operator, func: Any, args: Any, kwargs: Any) -> Any:
    return process_group.dispatch_collective(mode.machine, operator.name, func, args, kwargs)


def _run_functional(mode: RankMode, operator: Operator, func: Any, args: Any, kwargs: Any) -> Any:
    """Run a functional collective's own kernel with the mode on, so that its c10d calls are seen."""
    machine = mode.machine
    machine.functional_depth += 1
    try:
        with mode:
            return patches.run_composite(func, args, kwargs)
    finally:
        machine.functional_depth -= 1


def _run_host_read(mode: RankMode, operator: Operator, func: Any, args: Any, kwargs: Any) -> Any:
    """An operator that the host waits for."""
    machine = mode.machine
    accesses, _ = read_arguments(machine, operator, args, kwargs)
    if accesses:
        host_read(machine, operator.name, tuple(accesses))
    return func(*args, **kwargs)


def _run_sized_by_values(
    mode: RankMode, operator: Operator, func: Any, args: Any, kwargs: Any
) -> Any:
    """An operator whose result's size depends on values: the host waits, then it runs."""
    if host_reads.waits_for_sizes(operator.name, args, kwargs):
        accesses, _ = read_arguments(mode.machine, operator, args, kwargs)
        if accesses:
            host_read(mode.machine, operator.name, tuple(accesses))
    else:
        operator = replace(operator, waits_first=False)  # the values may still be to come
    return _run_op(mode, operator, func, args, kwargs)


def _run_indexing(mode: RankMode, operator: Operator, func: Any, args: Any, kwargs: Any) -> Any:
    """Indexing: where a mask is among the indices, the host waits for its count."""
    memory = mode.machine.memory
    masks = host_reads.masks_of(operator.name, args, memory)
    if masks:
        read = [access_of(mask, memory.record_of(mask).ordinal, write=False) for mask in masks]
        host_read(mode.machine, "nonzero", tuple(read))
    return _run_op(mode, operator, func, args, kwargs)


def _run_copy(mode: RankMode, operator: Operator, func: Any, args: Any, kwargs: Any) -> Any:
    """A copy from the device to the host stops the host unless ``non_blocking``."""
    memory = mode.machine.memory
    if host_reads.is_copy_to_host(args, kwargs, memory):
        source = access_of(args[1], memory.record_of(args[1]).ordinal, write=False)
        host_read(mode.machine, operator.name, (source,))
        return func(*args, **kwargs)
    return _run_op(mode, operator, func, args, kwargs)


def _run_empty(mode: RankMode, operator: Operator, func: Any, args: Any, kwargs: Any) -> Any:
    """Memory without values: an allocation, which reads and writes no bytes."""
    memory = mode.machine.memory
    found = [memory.find(tensor) for tensor, _ in operands(operator, args, kwargs)]
    like = [record for record in found if record is not None]
    out = func(*args, **kwargs)
    memory.born(out, is_host=bool(like) and all(record.is_host for record in like))
    if out.dtype is not torch.bool and memory.is_seen(out):
        memory.poison(out.untyped_storage())
    return out


def _run_resize(mode: RankMode, operator: Operator, func: Any, args: Any, kwargs: Any) -> Any:
    """``Tensor.resize_``: more memory is new memory, into which the old bytes are copied."""
    tensor, shape = args[0], args[1].shape if isinstance(args[1], Tensor) else args[1]
    storage = tensor.untyped_storage()
    nbytes_before = storage.nbytes()
    nbytes = (tensor.storage_offset() + math.prod(shape)) * tensor.itemsize
    run = _run_op if 0 < nbytes_before < nbytes else _run_untouched
    out = run(mode, operator, func, args, kwargs)
    mode.machine.memory.resized(storage, nbytes_before)
    return out


def host_read(machine: Machine, name: str, accesses: tuple[Access, ...]) -> None:
    """The host reads device bytes: an op on the current stream, then a wait for that stream."""
    stream = machine.current_stream_id()
    machine.host_wait(dict(machine.clocks.of(stream)), f"{name} reads a value")
    machine.emit(Kind.ATEN, name, stream, accesses)
    machine.emit(Kind.HOST_WAIT_STREAM, name, -1, other=stream)


def _run_op(mode: RankMode, operator: Operator, func: Any, args: Any, kwargs: Any) -> Any:
    """An operator that reads and writes on the current stream."""
    machine = mode.machine
    if machine.in_backward:
        machine.backward.at_op(args)
    accesses, records = read_arguments(machine, operator, args, kwargs)
    if machine.must_defer:
        return _run_later(mode, operator, func, args, kwargs, accesses, records)
    if len(accesses) < len(records):  # some are the host's
        if not accesses:
            return run_on_host(machine, func, args, kwargs)
        if operator.name not in host_reads.MIXES and host_reads.take_to_device(
            machine.memory, operands(operator, args, kwargs)
        ):
            accesses, records = read_arguments(machine, operator, args, kwargs)
    return run_on_stream(machine, operator, args, kwargs, accesses, records)


def run_on_stream(
    machine: Machine,
    operator: Operator,
    args: Any,
    kwargs: Any,
    accesses: list[Access],
    records: list[StorageRecord],
) -> Any:
    """Run an operator on the current stream; results on memory of their own are born there.

    ``accesses`` and ``records`` are those of its arguments; those of its results are added.
    """
    out = operator.run(*args, **kwargs)
    source = caller()
    if operator.returns_new:
        memory = machine.memory
        first_new = memory.next_ordinal
        for tensor in (out,) if out.__class__ is Tensor else deferral.flat(out):
            record = memory.born(tensor, source=source)
            if record is not None and (record.ordinal >= first_new or record not in records):
                records.append(record)
                accesses.append(access_of(tensor, record.ordinal, write=True))
    if accesses:  # else it is about tensors without memory
        stream = machine.current_stream_id()
        machine.emit(_ATEN, operator.name, stream, tuple(accesses), source=source)
    return out


def _run_later(
    mode: RankMode,
    operator: Operator,
    func: Any,
    args: Any,
    kwargs: Any,
    accesses: list[Access],
    records: list[StorageRecord],
) -> Any:
    """An operator whose inputs are still to come, on a rank that must go on without them."""
    machine = mode.machine
    machine.must_defer = False
    known = {record.ordinal: record for record in records}
    touched = [(known[access.storage], access) for access in accesses]
    try:
        return deferral.defer(machine, operator.name, func, args, kwargs, touched)
    except NotImplementedError:
        operator = _OPERATORS[id(func)] = replace(operator, can_defer=False)
        return _run_op(mode, operator, func, args, kwargs)


_SPECIAL: dict[str, Handler] = {
    "lift_fresh": _run_lift,
    "copy_": _run_copy,
    "resize_": _run_resize,
    "resize_as_": _run_resize,
    **dict.fromkeys(FACTORIES_WITHOUT_VALUES, _run_empty),
    **dict.fromkeys(host_reads.READS_VALUE, _run_host_read),
    **dict.fromkeys(host_reads.READS_SIZE, _run_sized_by_values),
    **dict.fromkeys(host_reads.INDEXES, _run_indexing),
}
"""Handlers of operators, by name with or without their overload."""


def run_on_host(machine: Machine, func: Any, args: Any, kwargs: Any) -> Any:
    """All inputs are made from Python data: so is the result, and no stream takes part."""
    out = func(*args, **kwargs)
    for tensor in deferral.flat(out):
        machine.memory.born(tensor, is_host=True)
    return out


def read_arguments(
    machine: Machine, operator: Operator, args: Any, kwargs: Any
) -> tuple[list[Access], list[StorageRecord]]:
    """Return the accesses to the arguments, after waiting for values that are still to come."""
    accesses: list[Access] = []
    records: list[StorageRecord] = []
    stream, find = machine.current_stream_id(), machine.memory.find
    for tensor, write in operands(operator, args, kwargs):
        record = find(tensor)
        if record is None:
            continue
        if not write and not operator.needs_memory:
            records += [record] if record.is_host else []  # so is the result then
            continue
        access = access_of(tensor, record.ordinal, write=write)
        if record.release is not None:
            machine.check_is_there(operator.name, record, access)
        if record.pending and not operator.waits_first:
            await_values(machine, record, access, operator)
        records.append(record)
        if not record.is_host:
            accesses.append(access)
            if record.stream != stream:
                record.is_shared = True
    return accesses, records


def operands(operator: Operator, args: Any, kwargs: Any) -> list[tuple[Tensor, bool]]:
    """Return the tensors among the arguments, in order, and whether each is written."""
    found: list[tuple[Tensor, bool]] = []
    count = len(args)
    for place, write in operator.places:
        if place < count:
            value = args[place]
            if value.__class__ is Tensor:
                found.append((value, write))
            else:
                _add_tensors(value, write, found)
    for name, value in kwargs.items():
        is_written = operator.writes[name]
        if is_written is not None:
            _add_tensors(value, is_written, found)
    return found


def _add_tensors(value: Any, write: bool, found: list[tuple[Tensor, bool]]) -> None:  # noqa: FBT001
    if isinstance(value, Tensor):
        found.append((value, write))
    elif isinstance(value, (list, tuple)):
        found += [(item, write) for item in value if item is not None]


def await_values(
    machine: Machine, record: StorageRecord, access: Access, operator: Operator
) -> None:
    """Park until pending collectives that this access is ordered after have moved their bytes.

    An access that is not ordered after them is a race, which the checkers report; it does not park.
    A host read is not parked here: it waits for its stream, as on hardware.
    """
    clock = machine.clocks.of(machine.current_stream_id())
    needs = []
    for part, lo, hi, writes in record.pending:
        conflicts = (access.write or writes) and lo < access.hi and access.lo < hi
        still_needed = writes or not part.is_ready
        if conflicts and still_needed and clock.get(part.stream, 0) >= part.tick:
            needs.append(part)
    if needs:
        machine.park_for(
            tuple(needs),
            f"{operator.name} needs values",
            is_host_wait=False,
            can_defer=operator.can_defer,
        )
