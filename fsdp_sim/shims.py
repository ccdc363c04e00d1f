"""Shims: which PyTorch names mean what while a world runs."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fsdp_sim import machine as machines
from fsdp_sim import patches, process_group, streams
from fsdp_sim.dispatch import host_read
from fsdp_sim.op import Kind
from fsdp_sim.tensors import access_of


def install(undo: patches.Patches) -> None:
    """Install every shim; ``undo`` puts all names back."""
    _install_streams(undo)
    _install_host_reads(undo)
    _install_memory(undo)
    _install_groups(undo)
    _install_ranges(undo)
    undo.replace(torch.cuda, "is_available", lambda: False)


def _install_streams(undo: patches.Patches) -> None:
    stream_class, event_class = streams.stream_classes()
    undo.replace(torch.cpu, "Stream", stream_class)
    undo.replace(torch.cpu, "Event", event_class)
    undo.replace(torch.cpu, "StreamContext", streams.StreamContext)
    undo.replace(torch.cpu, "stream", streams.StreamContext)
    undo.replace(torch.cpu, "current_stream", streams.current_stream)
    undo.replace(torch.cpu, "synchronize", streams.synchronize)
    undo.replace(torch.accelerator, "current_stream", streams.current_stream)
    undo.replace(torch.accelerator, "synchronize", streams.synchronize)
    undo.replace(torch.Tensor, "record_stream", streams.record_stream)


def _install_host_reads(undo: patches.Patches) -> None:
    """Reads that never reach dispatch on CPU, and for which CUDA's host would wait."""
    for name in ("tolist", "numpy"):
        undo.replace(Tensor, name, _reading(name, getattr(Tensor, name)))
    undo.replace(Tensor, "cpu", _moving("cpu", Tensor.cpu))
    undo.replace(Tensor, "to", _moving("to", Tensor.to))


def _read_by_host(tensor: Any, name: str) -> None:
    machine = machines.current()
    if machine is None or type(tensor) not in patches.PLAIN_TENSORS:
        return
    record = machine.memory.record_of(tensor)
    if not record.is_host:
        host_read(machine, name, (access_of(tensor, record.ordinal, write=False),))


def _reading(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        _read_by_host(self, name)
        return original(self, *args, **kwargs)

    return read


def _moving(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """``cpu()`` and ``to("cpu")`` stop the host unless ``non_blocking``."""

    @functools.wraps(original)
    def move(self: Any, *args: Any, **kwargs: Any) -> Any:
        target = kwargs.get("device", args[0] if args else None)
        to_host = name == "cpu" or (isinstance(target, str) and target == "cpu")
        if to_host and not kwargs.get("non_blocking", False):
            _read_by_host(self, name)
        return original(self, *args, **kwargs)

    return move


def _install_memory(undo: patches.Patches) -> None:
    original = torch.UntypedStorage.resize_

    @functools.wraps(original)
    def resize_(self: Any, nbytes: int) -> Any:
        machine = machines.current()
        if machine is None:
            return original(self, nbytes)
        before = self.nbytes()
        out = original(self, nbytes)
        machine.memory.resized(self, before)
        return out

    undo.replace(torch.UntypedStorage, "resize_", resize_)


def _install_groups(undo: patches.Patches) -> None:
    for name in patches.METHODS_WITH_REDUCE_OP:
        method = getattr(patches.ProcessGroup, name, None)
        if method is not None:
            undo.replace(patches.ProcessGroup, name, _keeping_factor(method))
    undo.replace(patches.ProcessGroup, "_start_coalescing", process_group.start_coalescing)
    undo.replace(patches.ProcessGroup, "_end_coalescing", process_group.end_coalescing)


def _keeping_factor(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        machine = machines.current()
        if machine is not None:
            options = kwargs.get("opts", args[-1] if args else None)
            factor = patches.premultiplier_of(options)
            if factor is not None:
                machine.premultiplier = factor
        return original(self, *args, **kwargs)

    return call


def _install_ranges(undo: patches.Patches) -> None:
    """Ranges label what is issued inside them; no profiler is needed."""
    record_function = torch.autograd.profiler.record_function
    enter, leave = record_function.__enter__, record_function.__exit__

    @functools.wraps(enter)
    def push(self: Any) -> Any:
        machine = machines.current()
        if machine is None:
            return enter(self)
        machine.push_range(self.name)
        return self

    @functools.wraps(leave)
    def pop(self: Any, *exc: Any) -> Any:
        machine = machines.current()
        if machine is None:
            return leave(self, *exc)
        machine.pop_range()
        return None

    undo.replace(record_function, "__enter__", push)
    undo.replace(record_function, "__exit__", pop)
