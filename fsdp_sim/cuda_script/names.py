"""Names: the one list of what a program that says ``cuda`` and ``nccl`` sees on simulated ranks.

Rank r has one GPU, cuda:r.  What is not on the list raises by its name.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, NoReturn, Self

import torch
from torch import Tensor

from fsdp_sim.checkers.caching_allocator import CachingAllocator
from fsdp_sim.cuda_script import tensors
from fsdp_sim.cuda_script.gpu import current, own_gpu
from fsdp_sim.engine import patches

MEMORY_NBYTES = 80 << 30
"""Memory of the simulated GPU; it is counted, and no run ends because it is full."""
CAPABILITY = (9, 0)
NAME = "simulated GPU"
CUDA_VERSION = "12.8"
NCCL_VERSION = (2, 27, 0)
_CPU = torch.device("cpu")


class Properties(NamedTuple):
    """What ``get_device_properties`` says."""

    name: str = NAME
    major: int = CAPABILITY[0]
    minor: int = CAPABILITY[1]
    total_memory: int = MEMORY_NBYTES
    multi_processor_count: int = 132
    warp_size: int = 32
    gcnArchName: str = ""  # noqa: N815  as PyTorch's


def install(undo: patches.Patches, world_size: int) -> None:
    """Redirect everything on the list, and refuse the rest by name; ``undo`` puts all names back."""
    functions = {**_streams(), **_devices(world_size), **_memory(), **_random()}
    for module in patches.CUDA_MODULES:
        _install_module(undo, module, functions)
    undo.replace(*patches.RAW_STREAM, None)
    undo.replace(*patches.CUDA_START, _refusing("this way of using a device 'cuda'"))
    _install_module(undo, patches.NCCL, {"version": lambda: NCCL_VERSION})
    _install_module(undo, torch.accelerator, {**_accelerator(world_size), **functions})
    tensors.install(undo)
    undo.replace(*patches.MACHINES_DEVICE, lambda: torch.device("cuda"))
    _install_autocast(undo)
    _install_groups(undo)
    _install_files(undo)
    undo.replace(torch.version, "cuda", CUDA_VERSION)
    undo.replace(torch, "get_device_module", _get_device_module(torch.get_device_module))
    undo.replace(torch, "compile", _compile)
    undo.replace(torch, "Generator", Generator)


def _install_module(undo: patches.Patches, module: ModuleType, functions: dict[str, Any]) -> None:
    for name in sorted(vars(module)):
        value = getattr(module, name)
        is_own = str(getattr(value, "__module__", "")).startswith(
            ("torch.cuda", "torch.accelerator")
        )
        if name in functions:
            undo.replace(module, name, functions[name])
        elif is_own and not name.startswith("_") and callable(value) and not _is_error(value):
            undo.replace(module, name, _refusing(f"{module.__name__}.{name}"))


def _is_error(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Exception)


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"{name} is not simulated: a CUDA script must do without it")

    return refuse


# ---------------------------------------------------------------------- streams and devices


def _streams() -> dict[str, Any]:
    """Streams and events are those that every world has."""
    names = (
        "Event",
        "Stream",
        "StreamContext",
        "current_stream",
        "default_stream",
        "is_current_stream_capturing",
        "set_stream",
        "stream",
        "synchronize",
    )
    return {name: getattr(torch.cpu, name) for name in names}


def _devices(world_size: int) -> dict[str, Any]:
    return {
        "can_device_access_peer": lambda device, peer_device: device != peer_device,
        "current_device": lambda: own_gpu().current,
        "device": device,
        "device_count": lambda: world_size,
        "get_device_capability": lambda device=None: CAPABILITY,
        "get_device_name": lambda device=None: NAME,
        "get_device_properties": lambda device=None: Properties(),
        "init": lambda: None,
        "is_available": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_initialized": lambda: own_gpu().is_initialized,
        "is_tf32_supported": lambda: True,
        "ipc_collect": lambda: None,
        "set_device": set_device,
    }


def set_device(device: Any) -> None:
    """Make a device current, which must be the rank's own; a negative one does nothing."""
    index = device if isinstance(device, int) else torch.device(device).index
    if index is not None and index >= 0:
        gpu = own_gpu()
        gpu.check_index(index)
        gpu.current = index


class device:  # noqa: N801  as PyTorch's
    """Makes a device current for its body."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self._outer = 0

    def __enter__(self) -> None:
        self._outer = own_gpu().current
        if self.device is not None:
            set_device(self.device)

    def __exit__(self, *_: object) -> None:
        own_gpu().current = self._outer


def _accelerator(world_size: int) -> dict[str, Any]:
    return {
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_idx": lambda: own_gpu().current,
        "current_device_index": lambda: own_gpu().current,
        "device_index": device,
        "empty_host_cache": lambda: None,
        "get_memory_info": lambda device_index=None: _memory_info(),
        "set_device_idx": set_device,
        "set_device_index": set_device,
    }


def _get_device_module(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda device=None: original("cuda" if device is None else device)


def _compile(model: Any = None, **_: Any) -> Any:
    """What would be compiled runs as it is written: its operators are seen one by one."""
    return (lambda function: function) if model is None else model


# ---------------------------------------------------------------------- memory and random numbers


def _memory() -> dict[str, Any]:
    return {
        "empty_cache": lambda: None,
        "max_memory_allocated": lambda device=None: _allocator().allocated_peak,
        "max_memory_reserved": lambda device=None: _allocator().reserved,
        "mem_get_info": lambda device=None: _memory_info(),
        "memory_allocated": lambda device=None: _allocator().allocated,
        "memory_reserved": lambda device=None: _allocator().reserved,
        "reset_max_memory_allocated": lambda device=None: _reset_peak(),
        "reset_peak_memory_stats": lambda device=None: _reset_peak(),
    }


def _allocator() -> CachingAllocator:
    return own_gpu().allocator()


def _memory_info() -> tuple[int, int]:
    return MEMORY_NBYTES - _allocator().reserved, MEMORY_NBYTES


def _reset_peak() -> None:
    allocator = _allocator()
    allocator.allocated_peak = allocator.allocated


def _random() -> dict[str, Any]:
    return {
        "get_rng_state": lambda device="cuda": own_gpu().rng_state.clone(),
        "get_rng_state_all": lambda: [own_gpu().rng_state.clone()],
        "manual_seed": _seed,
        "manual_seed_all": _seed,
        "set_rng_state": lambda new_state, device="cuda": _set_rng_state(new_state),
    }


_RealGenerator = torch.Generator


class _Generators(type(torch.Generator)):  # type: ignore[misc]
    """All generators are instances, those made before the world too."""

    def __instancecheck__(cls, instance: object) -> bool:
        return issubclass(type(instance), _RealGenerator)


class Generator(torch.Generator, metaclass=_Generators):
    """A generator of the GPU or the host; both draw as the CPU's does."""

    def __new__(cls, device: Any = "cpu") -> Self:
        """Make one."""
        return super().__new__(cls)

    def __init__(self, device: Any = "cpu") -> None:
        gpu = current()
        self._device = gpu.device if gpu is not None and gpu.is_here(device) else _CPU

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where its tensors must be."""
        return self._device


def _seed(seed: int) -> None:
    own_gpu().rng_state = torch.Generator().manual_seed(seed).get_state()


def _set_rng_state(state: Tensor) -> None:
    own_gpu().rng_state = state.clone()


# ---------------------------------------------------------------------- autocast, groups, files


def _install_autocast(undo: patches.Patches) -> None:
    """CUDA's autocast is the CPU's, with CUDA's default type."""
    undo.wrap(torch.autocast, "__init__", _autocasting)
    for name in ("is_autocast_enabled", "set_autocast_enabled", "set_autocast_dtype"):
        undo.wrap(torch, name, _of_cpu)
    undo.wrap(torch, "get_autocast_dtype", _autocast_dtype)


def _autocasting(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.float16
        original(self, device_type, dtype, *args, **kwargs)

    return init


def _of_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def ask(device_type: Any = "cuda", *args: Any) -> Any:
        return original("cpu" if device_type == "cuda" else device_type, *args)

    return ask


def _autocast_dtype(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def ask(device_type: str) -> Any:
        if device_type != "cuda":
            return original(device_type)
        return original("cpu") if torch.is_autocast_enabled("cpu") else torch.float16

    return ask


def _install_groups(undo: patches.Patches) -> None:
    for owner in patches.NAMES_OF_BACKENDS:
        undo.replace(owner, "get_backend", lambda group=None: "nccl")
        undo.replace(owner, "is_nccl_available", lambda: True)
    undo.replace(*patches.DEVICE_OF_OBJECTS, lambda group=None: "cuda")
    for module in patches.RNG_OF_MESHES:
        undo.replace(module, "is_rng_supported_mesh", lambda device_mesh: False)
    undo.wrap(patches.FullyShardedDataParallel, "__init__", _on_index)


def _on_index(original: Callable[..., None]) -> Callable[..., None]:
    """``FullyShardedDataParallel(device_id=1)``: C++ would look for that GPU."""

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if type(kwargs.get("device_id")) is int:
            kwargs["device_id"] = torch.device("cuda", kwargs["device_id"])
        original(self, *args, **kwargs)

    return init


def _install_files(undo: patches.Patches) -> None:
    """Files say of each tensor where it was, and ``torch.load`` puts it back there."""
    undo.wrap(patches.FILES, "location_tag", _tagging)
    undo.wrap(patches.FILES, "default_restore_location", _restoring)


def _tagging(original: Callable[..., str]) -> Callable[..., str]:
    def tag(storage: Any) -> str:
        gpu = current()
        record = None if gpu is None else gpu.machine.memory.known(_untyped(storage))
        is_here = gpu is not None and record is not None and not record.is_host
        return str(gpu.device) if gpu is not None and is_here else original(storage)

    return tag


def _restoring(original: Callable[..., Any]) -> Callable[..., Any]:
    def restore(storage: Any, location: str) -> Any:
        gpu = current()
        if gpu is None or not gpu.is_here(location):
            return original(storage, location)
        gpu.take(_untyped(storage))
        return storage

    return restore


def _untyped(storage: Any) -> Any:
    return getattr(storage, "_untyped_storage", storage)
