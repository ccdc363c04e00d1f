"""Tensors: how a CUDA script makes tensors on its GPU, moves them, and asks where they are."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdp_sim.cuda_script.gpu import current, device_of, is_on_gpu, own_gpu
from fsdp_sim.engine import patches


def install(undo: patches.Patches) -> None:
    """Let tensors be made on either device, and moved; ``undo`` puts all names back."""
    for owner, name in patches.FACTORIES:
        undo.wrap(owner, name, _making)
    for owner, name in patches.LIKE_FACTORIES:
        undo.wrap(owner, name, functools.partial(_making, like=True))
    for name in ("tensor", "as_tensor", "asarray"):
        undo.wrap(torch, name, _taking)
    attributes: dict[str, Any] = {
        "device": property(device_of),
        "is_cuda": property(lambda self: device_of(self).type == "cuda"),
        "is_cpu": property(lambda self: device_of(self).type == "cpu"),
        "get_device": lambda self: -1 if self.device.index is None else self.device.index,
        "new_tensor": _making(Tensor.new_tensor, like=True, of_data=True),
        "to": _to(Tensor.to),
        "type": _type(Tensor.type),
        "cuda": lambda self, device="cuda", non_blocking=False, memory_format=None: self.to(
            "cuda" if device is None else device,
            non_blocking=non_blocking,
            memory_format=memory_format or torch.preserve_format,
        ),
        "cpu": lambda self, memory_format=torch.preserve_format: self.to(
            "cpu", memory_format=memory_format
        ),
        "numpy": _only_on_host(Tensor.numpy),
        "__array__": _only_on_host(Tensor.__array__),
        "pin_memory": lambda self, device=None: _pin(self),
        "is_pinned": lambda self, device=None: _is_pinned(self),
    }
    for name, value in attributes.items():
        undo.replace(Tensor, name, value)
    for owner in (torch.cpu.Stream, torch.cpu.Event):
        undo.replace(owner, "device", property(lambda _: own_gpu().device))
    undo.replace(*patches.WRAPPER_MAKER, staticmethod(_wrapping(getattr(*patches.WRAPPER_MAKER))))
    undo.wrap(*patches.FOREACH_GROUPING, _grouping)
    undo.wrap(*patches.PARSE_TO, _of_index)


def _making(
    original: Callable[..., Any], *, like: bool = False, of_data: bool = False
) -> Callable[..., Any]:
    """A function that makes tensors where its argument ``device`` says.

    Args:
        original: the function.
        like: without a device, they are where another tensor is; else on the default device.
        of_data: no operator has that tensor as an argument: it is the function's first.
    """

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        gpu = current()
        if gpu is None:
            return original(*args, **kwargs)
        device = kwargs.get("device")
        if device is None and of_data:
            device = args[0].device
        elif device is None and not like:
            device = patches.default_device() or "cpu"
        is_here = None if device is None else gpu.is_here(device)
        if is_here is not None:
            kwargs["device"] = "cpu"
        pins = kwargs.pop("pin_memory", False)
        with gpu.making(is_here):
            out = original(*args, **kwargs)
        return _pin(out) if pins else out

    return make


def _taking(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes a tensor of data, which may be a tensor."""

    @functools.wraps(original)
    def take(data: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(data, Tensor):
            return _making(original)(data, *args, **kwargs)
        device = kwargs.pop("device", None)
        out = original(data, *args, **kwargs)
        return out if device is None else out.to(device)

    return take


def _of_index(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Module.to(1)``: an index alone is a GPU's."""

    @functools.wraps(original)
    def parse(*args: Any, **kwargs: Any) -> Any:
        if args and type(args[0]) is int:
            args = (torch.device("cuda", args[0]), *args[1:])
        if type(kwargs.get("device")) is int:
            kwargs["device"] = torch.device("cuda", kwargs["device"])
        return original(*args, **kwargs)

    return parse


def _to(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Tensor.to``: a copy where the device changes, for which the host waits on its way down."""

    @functools.wraps(original)
    def to(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        gpu = current()
        wanted = _parse_to(args, kwargs)
        if gpu is None or wanted.device is None:
            return original(self, *args, **kwargs)
        target, is_here = gpu.is_here(wanted.device), self.device.type == "cuda"
        if target is None or self.device.type == "meta":
            return original(self, *args, **kwargs)
        how = {"dtype": wanted.dtype or self.dtype, "memory_format": wanted.memory_format}
        if target == is_here:
            return original(self, copy=wanted.copy, **how)
        return _Across.apply(self, target, wanted.non_blocking, how)  # type: ignore[no-untyped-call]

    return to


def _type(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Tensor.type``: types of the GPU's tensors have names of their own, and are no way to go there."""

    @functools.wraps(original)
    def type_(self: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if str(dtype).startswith("torch.cuda."):
            raise NotImplementedError(f"Tensor.type({dtype!r}) is not simulated; use Tensor.to")
        out = original(self, dtype, *args, **kwargs)
        is_name = dtype is None and self.device.type == "cuda"
        return out.replace("torch.", "torch.cuda.") if is_name else out

    return type_


class _To(NamedTuple):
    """The arguments of ``Tensor.to``."""

    device: Any = None
    dtype: torch.dtype | None = None
    non_blocking: bool = False
    copy: bool = False
    memory_format: torch.memory_format = torch.preserve_format


def _parse_to(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _To:
    """Tell the three forms of ``Tensor.to`` apart: (other), (dtype) and (device, dtype)."""
    rest, named = list(args), dict(kwargs)
    other = named.pop("other", None)
    if other is None and rest and isinstance(rest[0], Tensor):
        other = rest.pop(0)
    if other is not None:
        named |= {"device": other.device, "dtype": other.dtype}
    elif rest and not isinstance(rest[0], torch.dtype):
        named["device"] = rest.pop(0)
    if rest and (rest[0] is None or isinstance(rest[0], torch.dtype)):
        named["dtype"] = rest.pop(0)
    named |= zip(("non_blocking", "copy"), rest, strict=False)
    return _To(**named)


class _Across(torch.autograd.Function):
    """A copy from the host to the GPU or back; its gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, to_gpu: bool, non_blocking: bool, how: Any) -> Tensor:
        """Copy."""
        ctx.back, ctx.non_blocking, ctx.dtype = not to_gpu, non_blocking, tensor.dtype
        with own_gpu().making(to_gpu):
            return patches.copy_across(tensor, non_blocking=non_blocking, **how)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Copy the gradient back."""
        how = {"dtype": ctx.dtype, "memory_format": torch.preserve_format}
        out = _Across.apply(gradient, ctx.back, ctx.non_blocking, how)  # type: ignore[no-untyped-call]
        return out, None, None, None


def _only_on_host(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def convert(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.device.type == "cuda":
            raise TypeError(
                f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the "
                "tensor to host memory first."
            )
        return original(self, *args, **kwargs)

    return convert


def _pin(tensor: Tensor) -> Tensor:
    """Return the tensor in memory that is pinned: a copy, unless it is already."""
    gpu = current()
    if gpu is None or _is_pinned(tensor):
        return tensor
    if is_on_gpu(gpu, tensor):
        raise RuntimeError(
            "cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned"
        )
    out = tensor.detach().clone()
    gpu.pinned.add(gpu.machine.memory.record_of(out).ordinal)
    return out


def _is_pinned(tensor: Tensor) -> bool:
    gpu = current()
    return gpu is not None and gpu.machine.memory.record_of(tensor).ordinal in gpu.pinned


def _wrapping(original: Callable[..., Any]) -> Callable[..., Any]:
    """What C++ knows of a subclass that wraps a tensor of the GPU is that it is on the CPU."""

    def make(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = torch.device("cpu")
        return original(*args, **kwargs)

    return make


def _grouping(original: Callable[..., Any]) -> Callable[..., Any]:
    """Optimizers group tensors in C++, which takes all for the CPU's."""

    def group(lists: Any, with_indices: bool = False) -> Any:
        groups = original(lists, with_indices)
        return {
            (members[0][0].device, dtype): (members, indices)
            for (_, dtype), (members, indices) in groups.items()
        }

    return group
