"""Shims: which PyTorch names mean what while a world runs."""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp_sim.engine import (
    deferral,
    groups,
    hashes,
    meshes,
    own_process,
    patches,
    streams,
    threads,
)
from fsdp_sim.engine import machine as machines
from fsdp_sim.engine.dispatch import host_read
from fsdp_sim.engine.faults import tear
from fsdp_sim.engine.tensors import access_of


def install(undo: patches.Patches, *, sees_operators: bool = True) -> None:
    """Install every shim, or only those that collectives need; ``undo`` puts all names back."""
    install_streams(undo)
    _hide_accelerators(undo)
    if sees_operators:
        install_backward(undo)
        install_host_reads(undo)
        install_memory(undo)
    groups.install(undo)
    threads.install(undo)
    meshes.install(undo)
    hashes.install(undo)
    _install_files(undo)
    install_ranges(undo, enters=False)
    undo.replace(torch.cuda.nvtx, "range_push", _push_nvtx)
    undo.replace(torch.cuda.nvtx, "range_pop", _pop_nvtx)
    undo.replace(torch.cuda.nvtx, "mark", lambda _: None)
    own_process.install(undo)


def install_streams(undo: patches.Patches) -> None:
    """Give torch.cpu what torch.cuda has of streams."""
    stream_class, event_class = streams.stream_classes()
    names: dict[str, Any] = {
        "Stream": stream_class,
        "Event": event_class,
        "StreamContext": streams.StreamContext,
        "stream": streams.stream,
        "current_stream": streams.current_stream,
        "default_stream": streams.default_stream,
        "set_stream": streams.set_current_stream,
        "get_stream_from_external": streams.get_stream_from_external,
        "is_current_stream_capturing": streams.is_current_stream_capturing,
        "synchronize": streams.synchronize,
    }
    for name, value in names.items():
        undo.define(torch.cpu, name, value)
    undo.replace(torch.Tensor, "record_stream", streams.record_stream)
    for owner, name in patches.RECORDS_OF_FSDP1:
        undo.replace(owner, name, streams.record_stream)


def _hide_accelerators(undo: patches.Patches) -> None:
    """Let the CPU be the only device, and what is said of "the accelerator" be said of it."""
    for name in ("current_stream", "set_stream", "synchronize"):
        # Another object: Dynamo takes functions of two modules to be two functions.
        undo.define(torch.accelerator, name, functools.partial(getattr(torch.cpu, name)))
    for name in ("Stream", "Event"):
        undo.replace(torch, name, getattr(torch.cpu, name))
    for module in (torch.cuda, torch.accelerator):
        undo.replace(module, "is_available", lambda: False)
        undo.replace(module, "device_count", lambda: 0)
    undo.replace(torch.accelerator, "current_accelerator", _no_accelerator)
    undo.replace(*patches.MACHINES_DEVICE, lambda: torch.device("cpu"))
    undo.replace(*patches.START_OF_CUDA, _refuse_cuda)


def _no_accelerator(check_available: bool = False) -> None:
    """Return None: a rank's device is the CPU's, whatever the machine has."""


def _refuse_cuda() -> None:
    caller = sys._getframe(1)  # noqa: SLF001  the only way to the caller's name
    is_function = str(caller.f_globals.get("__name__")).startswith("torch.cuda")
    what = f"torch.cuda.{caller.f_code.co_name}()" if is_function else "a use of the device 'cuda'"
    raise RuntimeError(
        f"CUDA is hidden inside a simulated world, got {what}; run a program "
        "that says cuda with fsdp-sim run --as cuda, or knobs=('cuda',), or let it ask "
        "torch.cuda.is_available() first"
    )


def install_backward(undo: patches.Patches) -> None:
    """Follow every run of autograd's engine."""
    for owner, name in patches.ENGINE_ENTRIES:
        undo.replace(owner, name, _following(getattr(owner, name)))


def _following(engine: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(engine)
    def run(roots: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
        machine = machines.current()
        if machine is None:
            return engine(roots, gradients, *args, **kwargs)
        ends = () if kwargs.get("accumulate_grad", True) else args[2]
        with machine.backward.following(roots, gradients, ends):
            return engine(roots, gradients, *args, **kwargs)

    return run


def install_host_reads(undo: patches.Patches) -> None:
    """Reads that never reach dispatch on CPU, and for which CUDA's host would wait."""
    for name in ("tolist", "numpy", "__dlpack__", "__reduce_ex__"):
        undo.replace(Tensor, name, _reading(name, getattr(Tensor, name)))
    undo.replace(Tensor, "__repr__", _printing(Tensor.__repr__))
    undo.replace(Tensor, "cpu", _moving("cpu", Tensor.cpu))
    undo.replace(Tensor, "to", _moving("to", Tensor.to))
    for name in ("tensor", "as_tensor", "asarray"):
        undo.replace(torch, name, _making(getattr(torch, name)))
    undo.replace(Tensor, "new_tensor", _making(Tensor.new_tensor, on_device=True))
    _install_objects(undo)


def _install_objects(undo: patches.Patches) -> None:
    """Objects of collectives travel on the device, as NCCL's do; the host waits once to have one back.

    Where a script says "cuda", its own names do that.
    """
    undo.wrap(*patches.WRITER_OF_OBJECTS, _on_device(_upload))
    undo.wrap(*patches.READER_OF_OBJECTS, _on_device(_download))


def _on_device(convert: Callable[..., Any]) -> Callable[[Any], Any]:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any) -> Any:
            machine = machines.current()
            if machine is None or machine.gpu is not None:
                return original(*args)
            return convert(machine, original, *args)

        return call

    return wrap


def _upload(_: machines.Machine, original: Callable[..., Any], *args: Any) -> Any:
    """Return an object's bytes and their number, made on the host, as tensors on the device."""
    with machines.unobserved():
        made = original(*args)
    return tuple(tensor.clone() for tensor in made)


def _download(
    machine: machines.Machine, original: Callable[..., Any], tensor: Tensor, *args: Any
) -> Any:
    """Return the object of bytes on the device, once the host has them."""
    _read_by_host(tensor, "cpu")
    with patches.below_dispatch():
        copy = tensor.clone()
    machine.memory.born(copy, is_host=True)
    return original(copy, *args)


def _read_by_host(tensor: Any, name: str) -> None:
    machine = machines.current()
    if type(tensor) not in patches.PLAIN_TENSORS:
        return
    if machine is None:
        threads.check_read(tensor, name)
        return
    record = machine.memory.record_of(tensor)
    if not record.is_host:
        access = access_of(tensor, record.ordinal, write=False)
        machine.check_is_there(name, record, access)
        host_read(machine, name, (access,))


def _reading(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        _read_by_host(self, name)
        return original(self, *args, **kwargs)

    return read


def _printing(original: Callable[..., Any]) -> Callable[..., Any]:
    """One read; what formatting does differs from version to version and is left out."""

    @functools.wraps(original)
    def show(self: Any, *args: Any, **kwargs: Any) -> Any:
        _read_by_host(self, "print")
        if machines.current() is None or type(self) not in patches.PLAIN_TENSORS:
            return original(self, *args, **kwargs)
        with machines.unobserved():
            return original(self, *args, **kwargs)

    return show


def _moving(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """``cpu()`` and ``to("cpu")`` stop the host unless ``non_blocking``.

    Only the plain word means the host: a ``torch.device`` is what a program calls its device.
    """

    @functools.wraps(original)
    def move(self: Any, *args: Any, **kwargs: Any) -> Any:
        target = kwargs.get("device", args[0] if args else None)
        to_host = name == "cpu" or (isinstance(target, str) and target == "cpu")
        if to_host and not kwargs.get("non_blocking", False):
            _read_by_host(self, name)
        return original(self, *args, **kwargs)

    return move


def _making(original: Callable[..., Any], *, on_device: bool = False) -> Callable[..., Any]:
    """Tensors from Python data are the host's, unless they are asked for on a device."""

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        machine = machines.current()
        device = kwargs.get("device")
        if machine is None or not (on_device or device not in (None, "cpu")):
            return original(*args, **kwargs)
        machine.makes_device_tensor = True
        try:
            return original(*args, **kwargs)
        finally:
            machine.makes_device_tensor = False

    return make


def install_memory(undo: patches.Patches) -> None:
    """See storages that are resized in place, and memory that is taken in from another tensor."""
    original = torch.UntypedStorage.resize_

    @functools.wraps(original)
    def resize_(self: Any, nbytes: int) -> Any:
        machine = machines.current()
        if machine is None:
            return original(self, nbytes)
        before = self.nbytes()
        deferral.before_resize(machine, self, nbytes)
        if nbytes == 0:
            machine.memory.poison(self)
        out = original(self, nbytes)
        machine.memory.resized(self, before)
        return out

    undo.replace(torch.UntypedStorage, "resize_", resize_)
    for owner in (torch, torch.utils.dlpack):
        undo.wrap(owner, "from_dlpack", _sharing)


def _sharing(original: Callable[..., Any]) -> Callable[..., Any]:
    """A tensor that takes a plain one's memory in shares its storage: another would count as other memory."""

    @functools.wraps(original)
    def from_dlpack(ext_tensor: Any, **how: Any) -> Any:
        is_plain = isinstance(ext_tensor, torch.Tensor) and not ext_tensor.requires_grad
        if machines.current() is None or how or not is_plain:
            return original(ext_tensor, **how)
        return ext_tensor.detach()

    return from_dlpack


def _install_files(undo: patches.Patches) -> None:
    """A checkpoint file that has been written is a site of faults."""
    undo.wrap(patches.FileSystem, "create_stream", _breakable)


def _breakable(original: Callable[..., Any]) -> Callable[..., Any]:
    @contextmanager
    def create_stream(self: Any, path: Any, mode: str) -> Iterator[Any]:
        with original(self, path, mode) as stream:
            yield stream
        machine = machines.current()
        if machine is not None and machine.faults is not None and "w" in mode:
            verdict = machine.faults.visit(machine.rank, "write", Path(path).name)
            if verdict == "torn":
                tear(Path(path), machine.rank)

    return create_stream


def install_ranges(undo: patches.Patches, *, enters: bool) -> None:
    """Ranges label what is issued inside them; no profiler is needed.

    Args:
        undo: puts the names back.
        enters: whether a range is a profiler's as well.
    """
    record_function = torch.autograd.profiler.record_function
    enter, leave = record_function.__enter__, record_function.__exit__

    @functools.wraps(enter)
    def push(self: Any) -> Any:
        machine = machines.current()
        if machine is not None:
            machine.push_range(self.name)
        return enter(self) if enters or machine is None else self  # type: ignore[no-untyped-call]

    @functools.wraps(leave)
    def pop(self: Any, *exc: Any) -> Any:
        machine = machines.current()
        if machine is not None:
            machine.pop_range()
        return leave(self, *exc) if enters or machine is None else None

    undo.replace(record_function, "__enter__", push)
    undo.replace(record_function, "__exit__", pop)


def _push_nvtx(msg: str) -> int:
    """Open a range, as ``record_function`` does; return how many were open."""
    machine = machines.current()
    if machine is None:
        return 0
    machine.push_range(msg)
    return len(machine.ranges) - 1


def _pop_nvtx() -> int:
    """Close the innermost range; return how many are open."""
    machine = machines.current()
    if machine is None:
        return 0
    machine.pop_range()
    return len(machine.ranges)
