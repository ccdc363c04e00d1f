"""Mode: what operators of a CUDA script do with tensors of the GPU, of the host, and of both.

All memory is really the CPU's.  A storage is the GPU's or the host's by its record, which the rank's
dispatch mode keeps right: what is computed from tensors of the GPU is the GPU's.  Memory that C++ code
makes on what it takes for the device of another tensor cannot be told from memory that it wants on the
host: it counts as the host's until an operator needs it on the GPU.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fsdp_sim.cuda_script.gpu import own_gpu
from fsdp_sim.engine import deferral, host_reads, patches
from fsdp_sim.engine.audit import AuditMode
from fsdp_sim.engine.dispatch import (
    NEEDS_NO_MEMORY,
    Operator,
    RankMode,
    host_read,
    is_made_of_others,
    moves_nothing,
    operands,
    operator_of,
    read_arguments,
    run_on_host,
    run_on_stream,
)
from fsdp_sim.engine.machine import Machine
from fsdp_sim.engine.memory import StorageRecord
from fsdp_sim.engine.tensors import access_of, tensors_in
from fsdp_sim.op import Access, Kind

_CPU = torch.device("cpu")


class CudaMode(RankMode):
    """The dispatch mode of one rank of a CUDA script."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self._gpu = own_gpu()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer one call: on the GPU, on the host, or from one to the other."""
        kwargs = kwargs or {}
        if (types and patches.is_python_subclass(types)) or is_made_of_others(func):
            return super().__torch_dispatch__(func, types, args, kwargs)
        operator = operator_of(func)
        if operator.name == "lift_fresh":
            out = func(*args, **kwargs)
            self._place(out, is_host=not self._gpu.target, is_placed=True)
            return out
        if moves_nothing(func):
            return func(*args, **kwargs)
        records = [self.machine.memory.record_of(tensor) for tensor in _plain((args, kwargs))]
        if func.namespace == "c10d":
            self._check_collective(operator, args, kwargs)
        elif "device" in operator.writes:
            return self._make(operator, func, args, kwargs, records)
        elif records and all(record.is_host for record in records):
            return self._run_on_host(func, args, kwargs, records)
        else:
            self._meet(operator, args, kwargs)
        return self._run_on_gpu(func, types, args, kwargs)

    # ------------------------------------------------------------------ where an operator runs

    def _make(
        self, operator: Operator, func: Any, args: Any, kwargs: Any, records: list[StorageRecord]
    ) -> Any:
        """An operator whose result's device can be said."""
        device = kwargs.get("device", _CPU)
        is_here = self._gpu.is_here(device)
        if is_here is None:
            return func(*args, **kwargs)
        has_gpu_arguments = any(not record.is_host for record in records)
        target = has_gpu_arguments if self._gpu.target is None else self._gpu.target
        if is_here:  # C++ code has said so, which is not redirected
            kwargs, target = {**kwargs, "device": _CPU}, True
        if target and (has_gpu_arguments or not records):
            return self._run_on_gpu(func, (), args, kwargs)
        if target:
            return self._upload(operator, args, kwargs)
        if has_gpu_arguments:
            return self._download(operator, func, args, kwargs)
        return self._run_on_host(func, args, kwargs, records)

    def _run_on_gpu(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if patches.draws_random_numbers(func) and kwargs.get("generator") is None:
            with self._gpu.drawing():
                return super().__torch_dispatch__(func, types, args, kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _run_on_host(self, func: Any, args: Any, kwargs: Any, records: list[StorageRecord]) -> Any:
        """All is the host's; what depends on memory that may move may move itself."""
        is_placed = self._gpu.target is False or (
            bool(records) and all(record.is_placed for record in records)
        )
        out = run_on_host(self.machine, func, args, kwargs)
        self._place(out, is_host=True, is_placed=is_placed)
        return out

    def _upload(self, operator: Operator, args: Any, kwargs: Any) -> Any:
        """From the host to the GPU: an op on the current stream that writes there."""
        if self.machine.in_backward:
            self.machine.backward.at_op(args)
        return run_on_stream(self.machine, operator, args, kwargs, [], [])

    def _download(self, operator: Operator, func: Any, args: Any, kwargs: Any) -> Any:
        """From the GPU to the host, which waits unless ``non_blocking``."""
        machine = self.machine
        if operator.name in NEEDS_NO_MEMORY:
            pass
        elif kwargs.get("non_blocking", False):
            cannot_wait = replace(operator, can_defer=False)
            accesses, _ = read_arguments(machine, cannot_wait, args, kwargs)
            machine.emit(Kind.ATEN, operator.name, machine.current_stream_id(), tuple(accesses))
        else:
            host_read(machine, operator.name, self._reads((args, kwargs)))
        out = func(*args, **kwargs)
        self._place(out, is_host=True, is_placed=True)
        return out

    def _reads(self, arguments: Any) -> tuple[Access, ...]:
        memory = self.machine.memory
        with_records = [(tensor, memory.record_of(tensor)) for tensor in _plain(arguments)]
        return tuple(
            access_of(tensor, record.ordinal, write=False)
            for tensor, record in with_records
            if not record.is_host
        )

    def _place(self, out: Any, *, is_host: bool, is_placed: bool) -> None:
        for tensor in deferral.flat(out):
            record = self.machine.memory.born(tensor, is_host=is_host)
            if record is not None:
                record.is_placed = record.is_placed or is_placed

    # ------------------------------------------------------------------ what may meet

    def _meet(self, operator: Operator, args: Any, kwargs: Any) -> None:
        """Where tensors of both kinds meet, those that may move do; the program's own must not.

        Raises:
            RuntimeError: as CUDA's, where a tensor of the host's is among those of the GPU.
        """
        memory = self.machine.memory
        for tensor, is_written in operands(operator, args, kwargs):
            record = memory.find(tensor)
            if record is None or not record.is_host or not (is_written or tensor.dim()):
                continue
            if not record.is_placed:
                if is_written or operator.name not in host_reads.MIXES:
                    memory.to_device(tensor)
            elif operator.name not in host_reads.MIXES:
                raise RuntimeError(
                    f"{operator.name}: expected all tensors to be on the same device, but found at "
                    f"least two devices, {self._gpu.device} and cpu"
                )

    def _check_collective(self, operator: Operator, args: Any, kwargs: Any) -> None:
        """NCCL's tensors are on the GPU.

        Raises:
            RuntimeError: a tensor that the program has on the host is among them.
        """
        memory = self.machine.memory
        for tensor in _plain((args, kwargs)):
            record = memory.record_of(tensor)
            if record.is_host and record.is_placed:
                raise RuntimeError(
                    f"{operator.name}: a collective of a CUDA script must have its tensors on "
                    f"{self._gpu.device}, as NCCL's, got one on the host; move it there (collectives of "
                    "gloo on the host are not simulated beside NCCL's)"
                )


class AuditedCudaMode(AuditMode, CudaMode):
    """The same under the self-audit: the bytes of each operator's arguments are compared."""


def _plain(value: Any) -> Iterator[Tensor]:
    """Yield the tensors with memory among arguments."""
    for tensor in tensors_in(value):
        if patches.device_of(tensor).type == "cpu" and tensor.layout is torch.strided:
            yield tensor
