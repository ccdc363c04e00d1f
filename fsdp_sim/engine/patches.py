"""Patches: every replacement of a PyTorch name - where, why, which versions; undone on exit.

The only file of the simulator with private names.
"""

import ctypes
import functools
import gc
import importlib
import os
import random
import struct
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

# Imported before the first world: their first import inside a rank leaves a garbage cycle that pins the
# rank's frames (torch._dynamo), or binds that rank's group as a default argument (nn.functional).
import torch._dynamo  # isort: skip
import torch.distributed.device_mesh  # isort: skip
import torch.distributed.checkpoint.filesystem  # isort: skip
import torch.distributed.nn.functional  # isort: skip
import torch.distributed.tensor._dispatch  # isort: skip
import torch.distributed.tensor._random  # isort: skip
import torch.distributed.tensor._sharding_prop  # isort: skip
import torch.utils._python_dispatch as python_dispatch
from torch._C._distributed_c10d import Backend, FakeProcessGroup, ReduceOp
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import ProcessGroup as ProcessGroup
from torch._C._distributed_c10d import Store as Store
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch.utils._device import DeviceContext, _device_constructors

_Function = TypeVar("_Function", bound=Callable[..., Any])

BACKEND = "sim"
MISSING = object()


class Patches:
    """Replacements in force, undone in reverse order: all of them, also when undoing one raises."""

    def __init__(self) -> None:
        self._undo = ExitStack()

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Replace ``owner.name`` if this version of PyTorch has it."""
        if not hasattr(owner, name):
            return
        if owner is torch:
            self._tell_torchscript(getattr(torch, name), value)
        own = owner.__dict__.get(name, MISSING)
        setattr(owner, name, value)
        if own is MISSING:
            self._undo.callback(delattr, owner, name)
        else:
            self._undo.callback(setattr, owner, name, own)

    def _tell_torchscript(self, function: Any, replacement: Any) -> None:
        """Let TorchScript compile a replacement as what it replaces: it knows functions by identity."""
        operators = torch.jit._builtins._get_builtin_table()
        operator = operators.get(id(function))
        if operator is not None:
            operators[id(replacement)] = operator
            self._undo.callback(operators.pop, id(replacement))

    def define(self, owner: Any, name: str, value: Any) -> None:
        """Give ``owner`` a name that it may not have."""
        if hasattr(owner, name):
            self.replace(owner, name, value)
            return
        setattr(owner, name, value)
        self._undo.callback(delattr, owner, name)

    def wrap(self, owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
        """Replace ``owner.name`` by what ``wrapper`` makes of it, if this version has it."""
        if hasattr(owner, name):
            self.replace(owner, name, wrapper(getattr(owner, name)))

    def replace_wrapped(self, function: Any, wrapper: Callable[[Any], Any]) -> None:
        """Replace what a decorated function calls in the end.

        Names that were bound to the function before, by an import in a test or inside PyTorch, see it
        too, which a replacement of one module's attribute would not give.
        """
        while hasattr(function.__wrapped__, "__wrapped__"):
            function = function.__wrapped__
        original = function.__wrapped__
        (cell,) = (each for each in function.__closure__ if each.cell_contents is original)
        cell.cell_contents = wrapper(original)
        self._undo.callback(setattr, cell, "cell_contents", original)

    def on_exit(self, undo: Callable[[], None]) -> None:
        """Call ``undo`` when the replacements are undone."""
        self._undo.callback(undo)

    def undo(self) -> None:
        """Put everything back."""
        self._undo.close()


# ---------------------------------------------------------------------- per-process state (isolation)

get_rng_state = torch.default_generator.get_state
set_rng_state: Callable[[Any], Any] = torch.default_generator.set_state
get_default_dtype = torch.get_default_dtype
set_default_dtype = torch.set_default_dtype

_DISPATCH_FLAGS = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)


def get_dispatch_flags() -> tuple[Any, ...]:
    """Return the process-wide flags that say a dispatch mode is active (torch 2.11 to 2.14)."""
    return tuple(getattr(python_dispatch, name, MISSING) for name in _DISPATCH_FLAGS)


def set_dispatch_flags(values: tuple[Any, ...]) -> None:
    """Put the flags back: interleaved exits of modes would leave them set."""
    for name, value in zip(_DISPATCH_FLAGS, values, strict=True):
        if value is not MISSING:
            setattr(python_dispatch, name, value)


def get_environ() -> Any:
    """Return the dictionary behind ``os.environ``."""
    return os.environ._data  # type: ignore[attr-defined]


def set_environ(data: Any) -> None:
    """Put another dictionary behind ``os.environ``; C's ``getenv`` still sees one process."""
    os.environ._data = data  # type: ignore[attr-defined]


def environ_with(values: dict[str, str]) -> Any:
    """Return a copy of the dictionary behind ``os.environ`` with other values, for one rank."""
    encode: Any = os.environ.encodekey
    return get_environ() | {encode(name): encode(value) for name, value in values.items()}


def restore_c_environ(used: list[Any]) -> None:
    """Undo in C's environment, which has no ranks, what programs have set in theirs.

    Args:
        used: the dictionaries behind ``os.environ`` of all ranks.
    """
    home = get_environ()
    for name in {name: None for environ in used for name in (*environ, *home)}:
        if any(environ.get(name) != home.get(name) for environ in used):
            if name in home:
                os.putenv(name, home[name])
            else:
                os.unsetenv(name)


def get_c10d_world() -> Any:
    """Return the process groups known to ``torch.distributed``."""
    return c10d._world


def set_c10d_world(world: Any) -> None:
    """Replace the process groups known to ``torch.distributed``."""
    c10d._world = world


_PROCESS_GLOBALS: tuple[tuple[Any, str], ...] = (
    (torch.distributed.tensor.DTensor._op_dispatcher, "_custom_op_handlers"),
    (torch.nn.parallel.DistributedDataParallel, "_active_ddp_module"),
    (torch.utils.checkpoint, "_enable_checkpoint_early_stop"),
    (torch.utils.checkpoint, "_checkpoint_debug_enabled"),
    (importlib.import_module("torch._functorch.eager_transforms"), "JVP_NESTING"),
    (importlib.import_module("torch.optim.optimizer"), "_global_optimizer_pre_hooks"),
    (importlib.import_module("torch.optim.optimizer"), "_global_optimizer_post_hooks"),
    *(
        (torch.nn.modules.module, name)
        for name in (
            "_global_buffer_registration_hooks",
            "_global_module_registration_hooks",
            "_global_parameter_registration_hooks",
            "_global_backward_pre_hooks",
            "_global_backward_hooks",
            "_global_is_full_backward_hook",
            "_global_forward_pre_hooks",
            "_global_forward_hooks",
            "_global_forward_hooks_always_called",
            "_global_forward_hooks_with_kwargs",
        )
    ),
)
"""Variables of PyTorch's modules and classes that programs change, for as long as a block lasts or for good
(torch 2.11 to 2.14): ``loss_parallel``, a forward of DDP, depth of ``jvp``, hooks of all modules."""


def get_process_globals() -> list[Any]:
    """Return what ``_PROCESS_GLOBALS`` hold."""
    return [getattr(owner, name) for owner, name in _PROCESS_GLOBALS]


def set_process_globals(values: list[Any]) -> None:
    """Put it back."""
    for (owner, name), value in zip(_PROCESS_GLOBALS, values, strict=True):
        setattr(owner, name, value)


def warnings_filters_changed() -> None:
    """Tell the warnings module that its filters were replaced."""
    warnings._filters_mutated()  # type: ignore[attr-defined]


class _RandomMemory:
    """The state of Python's ``random`` as bytes: to copy it takes a fiftieth of ``getstate``."""

    words = 624

    def __init__(self) -> None:
        self._instance: Any = random._inst
        self._address = id(self._instance) + object.__basicsize__
        self._nbytes = 4 * (1 + self.words)  # a position, and the Mersenne Twister's words

    def is_usable(self) -> bool:
        """Whether this Python keeps the state as it is read here."""
        if sys.implementation.name != "cpython":
            return False
        *words, position = random.getstate()[1]
        raw = ctypes.string_at(self._address, self._nbytes)
        return raw == struct.pack(f"i{self.words}I", position, *words)

    def save(self) -> Any:
        """Return the state."""
        return ctypes.string_at(self._address, self._nbytes), self._instance.gauss_next

    def restore(self, value: Any) -> None:
        """Put a state back."""
        raw, self._instance.gauss_next = value
        ctypes.memmove(self._address, raw, self._nbytes)


_RANDOM = _RandomMemory()
get_random_state, set_random_state = (
    (_RANDOM.save, _RANDOM.restore) if _RANDOM.is_usable() else (random.getstate, random.setstate)
)


def get_warning_printer() -> Any:
    """Return what shows a warning, which ``catch_warnings(record=True)`` replaces."""
    return warnings._showwarnmsg_impl  # type: ignore[attr-defined]


def set_warning_printer(printer: Any) -> None:
    """Replace what shows a warning."""
    warnings._showwarnmsg_impl = printer  # type: ignore[attr-defined]


def get_numerics() -> tuple[Any, ...]:
    """Return PyTorch's process-wide settings of how it computes and checks."""
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
        torch.is_anomaly_enabled(),
        torch.is_anomaly_check_nan_enabled(),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
    )


def set_numerics(values: tuple[Any, ...]) -> None:
    """Put them back."""
    if values == get_numerics():
        return
    deterministic, warn_only, precision, anomaly, check_nan, *attention = values
    torch._C._set_deterministic_algorithms(deterministic, warn_only=warn_only)
    torch.set_float32_matmul_precision(precision)
    torch.set_anomaly_enabled(anomaly, check_nan)
    for kernels, is_enabled in zip(_ATTENTION_KERNELS, attention, strict=True):
        kernels(is_enabled)


_ATTENTION_KERNELS: tuple[Callable[[bool], None], ...] = (
    torch._C._set_sdp_use_flash,
    torch._C._set_sdp_use_mem_efficient,
    torch._C._set_sdp_use_math,
    torch._C._set_sdp_use_cudnn,
)
"""Which kernels of attention ``sdpa_kernel`` allows, in the order of ``get_numerics``."""


# ---------------------------------------------------------------------- per-thread state (isolation)

set_grad_enabled = torch._C._set_grad_enabled


def get_autocast() -> tuple[Any, ...]:
    """Return the thread's autocast settings for the device of a world."""
    enabled, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    return enabled, dtype, torch.is_autocast_cache_enabled()


def set_autocast(values: tuple[Any, ...]) -> None:
    """Put them back."""
    enabled, dtype, cache = values
    torch.set_autocast_enabled("cpu", enabled)
    torch.set_autocast_dtype("cpu", dtype)
    torch.set_autocast_cache_enabled(cache)


def disable_autocast_cache() -> None:
    """Cast a weight anew each time on this thread."""
    torch.set_autocast_cache_enabled(False)


def forget_default_device() -> None:
    """Undo ``torch.set_default_device`` on this thread."""
    if getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None) is not None:
        torch.set_default_device(None)


def mode_depths() -> tuple[int, int]:
    """Return how many function and dispatch modes are entered on this thread."""
    return torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()


def leave_modes(depths: tuple[int, int]) -> None:
    """Leave the modes that a program has entered and not left."""
    while torch._C._len_torch_function_stack() > depths[0]:
        torch._C._pop_torch_function_stack()
    while torch._C._len_torch_dispatch_stack() > depths[1]:
        python_dispatch._pop_mode()


def leave_saved_tensor_hooks() -> None:
    """Leave the hooks of saved tensors that a program has entered and not left."""
    top = torch._C._autograd._top_saved_tensors_default_hooks
    while top(True) is not None:  # noqa: FBT003  ignore_is_tracing
        torch._C._autograd._pop_saved_tensors_default_hooks()


class RankC10dWorld(c10d._World):
    """The process groups of one rank; the base class keeps them in module globals."""

    pg_map: Any = None
    pg_names: Any = None
    pg_group_ranks: Any = None
    pg_backend_config: Any = None
    group_count: Any = 0
    tags_to_pg: Any = None
    pg_to_tag: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.pg_map, self.pg_names, self.pg_group_ranks = {}, {}, {}
        self.pg_backend_config, self.tags_to_pg, self.pg_to_tag = {}, {}, {}
        self.group_count = 0


# ---------------------------------------------------------------------- process groups


def register_backend(made: Callable[[str], None]) -> None:
    """Register backend "sim": a plain ProcessGroup whose every call the rank's mode answers.

    A group that a program takes out of its world is answered by nobody: its collectives raise.

    Args:
        made: told the name of each group as it is made.
    """
    untyped: Any = FakeProcessGroup

    def make(options: Any, _: Any) -> Any:
        made(str(options.group_id))
        refusing = untyped.Options()
        refusing.error_on_collective = True
        return untyped._create_internal(options.group_rank, options.group_size, refusing)

    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, make, extended_api=True, devices=["cpu", "cuda"])


FileSystem = torch.distributed.checkpoint.filesystem.FileSystem
"""What writes the files of distributed checkpoints."""

ShardingPropagator = torch.distributed.tensor._sharding_prop.ShardingPropagator
SHAPE_PROPAGATION = "_propagate_tensor_meta_non_cached"
"""How DTensor finds the shapes of results, and keeps them in a cache of the thread."""


def push_mode(mode: Any) -> None:
    """Enter a dispatch mode for the rest of a thread's life, past the flags that are the process's."""
    python_dispatch._push_mode(mode)


def without_dispatch_modes() -> Any:
    """Run operators that no dispatch mode entered so far sees."""
    return python_dispatch._disable_current_modes()


DeviceMesh = torch.distributed.device_mesh.DeviceMesh


def mark_mesh(mesh: Any, mark: Any) -> None:
    """Make a mesh equal to those of the same ranks that have the same mark, and to no others."""
    mesh._thread_id = mark
    mesh._hash = None


def mark_of_mesh(mesh: Any) -> Any:
    """Return the mark of a mesh."""
    return mesh._thread_id


def root_of_mesh(mesh: Any) -> Any:
    """Return the mesh that a mesh was sliced from, or None."""
    return getattr(mesh, "_root_mesh", None)


def group_names_of_mesh(mesh: Any) -> tuple[str, ...]:
    """Return the names of a mesh's process groups."""
    return tuple(getattr(mesh, "_dim_group_names", ()))


def key_of_mesh(mesh: Any) -> Any:
    """Return what equal meshes have in common."""
    return (
        mesh.device_type,
        mesh.mesh_dim_names,
        mesh.shape,
        tuple(tensors_of_mesh(mesh)[0].tolist()),
    )


def tensors_of_mesh(mesh: Any) -> list[torch.Tensor]:
    """Return the tensors of ranks that a mesh holds."""
    return [value for value in vars(mesh).values() if isinstance(value, torch.Tensor)]


def unbox_group(boxed: Any) -> Any:
    """Return the ProcessGroup of a dispatched argument."""
    return ProcessGroup.unbox(boxed)


def reduce_op_name(boxed: Any) -> str:
    """Return the name of a dispatched reduce op."""
    return str(ReduceOp.RedOpType(boxed.op()).name)


def is_registered_group(group: Any) -> bool:
    """Whether the group was made through ``torch.distributed`` by this rank of this world."""
    return group in c10d._world.pg_map


def group_ranks(group: Any) -> tuple[int, ...]:
    """Return the global ranks of a group in group order."""
    by_global = c10d._world.pg_group_ranks[group]
    return tuple(sorted(by_global, key=lambda rank: by_global[rank]))


def new_local_group(ranks: tuple[int, ...], desc: str | None) -> Any:
    """Make a group that only its own ranks make."""
    return c10d._new_group_with_tag(list(ranks), use_local_synchronization=True, group_desc=desc)


def bind_device(device: Any) -> None:
    """Tell the default group which device the program has bound it to, if any."""
    if device is not None:
        world: Any = dist.group.WORLD
        world.bound_device_id = torch.device("cuda", device) if isinstance(device, int) else device


def drop_groups() -> None:
    """Forget the groups of a rank that has ended, in C++ too."""
    torch._C._distributed_c10d._unregister_all_process_groups()


def reduction_of(options: Any) -> tuple[str, Any] | None:
    """Return the name of the reduce op in a call's options, and the factor of a premultiplied sum.

    The dispatched op no longer shows the factor, and its name takes a call into TorchScript.
    """
    reduce_op = getattr(options, "reduceOp", None)
    if reduce_op is None:
        return None
    name = _REDUCTIONS[reduce_op.op]
    # ``factor`` is new in torch 2.12; what is pickled has it on every version
    return name, reduce_op.__getstate__()[1] if name == "PREMUL_SUM" else None


_REDUCTIONS = {
    getattr(ReduceOp.RedOpType, name): name
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
}


QueueEmptyError: type[Exception] = getattr(dist, "QueueEmptyError", RuntimeError)
STORE_OWNERS = (dist, c10d)
FUTURES = torch._C


def future_of_tensors(tensors: list[torch.Tensor]) -> Any:
    """Return a completed Future whose value is a C++ list of tensors, not a Python object."""
    return torch._C.fork(lambda: tensors)


MACHINES_DEVICE = (torch._C, "_get_accelerator")
"""Where PyTorch's own Python asks for the machine's accelerator, or its CPU."""
START_OF_CUDA = (torch.cuda, "_lazy_init")
"""What every function of ``torch.cuda`` calls first that needs the GPU."""
DEBUG_OFF = dist.DebugLevel.OFF
DEBUG_LEVEL_OWNER = c10d
INIT_PROCESS_GROUP = c10d.init_process_group
NEW_GROUP = c10d.new_group
SPLIT_GROUP = c10d.split_group
MONITORED_BARRIER_OWNERS = (c10d, dist)
RPC = torch.distributed.rpc
DistributedDataParallel = torch.nn.parallel.DistributedDataParallel
FullyShardedDataParallel = torch.distributed.fsdp.FullyShardedDataParallel
RECORDS_OF_FSDP1 = tuple(
    (importlib.import_module(f"torch.distributed.fsdp.{module}"), "_no_dispatch_record_stream")
    for module in ("_common_utils", "_flat_param", "_runtime_utils")
)
"""What ``FullyShardedDataParallel`` calls instead of ``Tensor.record_stream``, and skips on CPUs."""


@functools.cache
def _c10d_operators() -> list[str]:
    return [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("c10d::")]


@contextmanager
def listening() -> Iterator[Patches]:
    """Say that a profiler listens, so that runtimes open their ranges, and undo every replacement."""
    patches = Patches()
    patches.replace(torch.autograd.profiler, "_is_profiler_enabled", value=True)
    try:
        yield patches
    finally:
        patches.undo()


def replace_collectives(
    undo: Patches, kernel: Callable[[str, Any], Callable[..., Any]], refuse: Callable[..., Any]
) -> None:
    """Replace what collectives do that no dispatch mode sees, and which FakeProcessGroup would skip.

    Args:
        undo: puts everything back.
        kernel: makes a collective's kernel from its name and its operator.
        refuse: called where a backend that was built by hand is.
    """
    library = torch.library.Library("c10d", "IMPL")
    names = _c10d_operators()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns once that a kernel is overridden
        for name in names:
            name = name.removeprefix("c10d::")
            func = getattr(torch.ops.c10d, name).default
            library.impl(name, kernel(name, func), "CPU", allow_override=True)
    undo.on_exit(library._destroy)
    for name in BACKEND_METHODS:
        undo.replace(Backend, name, refuse)


BACKEND_METHODS = (
    "_allgather_base",
    "_reduce_scatter_base",
    "allgather",
    "allgather_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "monitored_barrier",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
)

METHODS_WITH_WORK = tuple(
    name
    for name in (
        "_allgather_base",
        "_reduce_scatter_base",
        "all_gather_single",
        "all_gather_single_coalesced",
        "all_to_all_single",
        "allgather",
        "allgather_coalesced",
        "allgather_into_tensor_coalesced",
        "allreduce",
        "allreduce_coalesced",
        "alltoall",
        "alltoall_base",
        "barrier",
        "broadcast",
        "gather",
        "recv",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_single",
        "reduce_scatter_single_coalesced",
        "reduce_scatter_tensor_coalesced",
        "scatter",
        "send",
    )
    if hasattr(ProcessGroup, name)
)
"""Methods of a process group that issue an operation and return its handle (torch 2.11 to 2.14)."""

METHODS_WITH_REDUCE_OP = (
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
)


PROFILER = torch.autograd.profiler
PROFILER_STARTS, PROFILER_END = ("_prepare_profiler", "_enable_profiler"), "_disable_profiler"
"""What PyTorch's profiler calls when it begins to warm up or record, and when it ends."""

FORWARD_MODE = torch.autograd.forward_ad
FORWARD_MODE_STARTS, FORWARD_MODE_END = ("enter_dual_level",), "exit_dual_level"
"""What begins and ends the one level of forward-mode differentiation that a process has."""

OWNERS_OF_EXECUTORS = tuple(
    importlib.import_module(f"torch.distributed.checkpoint.{module}")
    for module in ("_async_thread_executor", "staging")
)
"""Where ``async_save`` makes the executors of its threads."""

STARTERS_OF_PROCESSES = (
    torch.multiprocessing,
    importlib.import_module("torch.multiprocessing.spawn"),
)
"""Where ``torch.multiprocessing`` starts processes: the function and the name that ``spawn`` calls it by."""


# ---------------------------------------------------------------------- CUDA scripts


def default_device() -> torch.device | None:
    """Return the device of the innermost ``with torch.device(...)`` or ``set_default_device``."""
    for mode in reversed(torch.overrides._get_current_function_mode_stack()):
        if isinstance(mode, DeviceContext):
            device: torch.device = mode.device
            return device
    return None


def draws_random_numbers(func: Any) -> bool:
    """Whether an operator takes numbers from a generator."""
    return torch.Tag.nondeterministic_seeded in func.tags


def copy_across(tensor: torch.Tensor, **how: Any) -> torch.Tensor:
    """Copy a tensor by the operator behind ``Tensor.to``, whatever that has been replaced by."""
    return torch.ops.aten._to_copy.default(tensor, **how)


_CONSTRUCTORS: Any = _device_constructors()
FACTORIES: tuple[tuple[Any, str], ...] = tuple(
    (torch, name)
    for name in sorted(each.__name__ for each in _CONSTRUCTORS)
    if getattr(torch, name, None) in _CONSTRUCTORS
    and name not in ("tensor", "as_tensor", "asarray")
)
"""Functions that make tensors on a device, the default one unless they are told."""

LIKE_FACTORIES: tuple[tuple[Any, str], ...] = (
    *(
        (torch, f"{name}_like")
        for name in ("empty", "full", "ones", "rand", "randint", "randn", "zeros")
    ),
    *(
        (torch.Tensor, f"new_{name}")
        for name in ("empty", "empty_strided", "full", "ones", "zeros")
    ),
)
"""Functions that make tensors where another one is, unless they are told."""

PARSE_TO = (torch._C._nn, "_parse_to")
"""How ``Module.to`` reads its arguments."""
NCCL = importlib.import_module("torch.cuda.nccl")
CUDA_START = (torch.cuda, "_lazy_init")
"""What PyTorch calls before the first use of a CUDA device."""
RAW_STREAM = (torch._C, "_cuda_getCurrentRawStream")
"""CUDA's own handle of a stream, where PyTorch is built with CUDA."""
WRAPPER_MAKER = (torch.Tensor, "_make_wrapper_subclass")
FOREACH_GROUPING = (torch._C, "_group_tensors_by_device_and_dtype")
CUDA_MODULES = (
    torch.cuda,
    torch.cuda.memory,
    torch.cuda.random,
    torch.cuda.streams,
    torch.cuda.graphs,
)
NAMES_OF_BACKENDS = (dist, c10d)
DEVICE_OF_OBJECTS = (c10d, "_get_object_coll_device")
WRITER_OF_OBJECTS = (c10d, "_object_to_tensor")
READER_OF_OBJECTS = (c10d, "_tensor_to_object")
RNG_OF_MESHES = (torch.distributed.tensor._random, torch.distributed.tensor._dispatch)
FILES = torch.serialization


# ---------------------------------------------------------------------- installation


def current_autograd_node() -> Any:
    """Return the backward node that runs on this thread, or None."""
    return torch._C._current_autograd_node()


ENGINE_ENTRIES = (
    (torch.autograd, "_engine_run_backward"),
    (torch.autograd.graph, "_engine_run_backward"),
)
"""Where every backward pass starts: the function and the name that it is called by."""


def next_node_number() -> int:
    """Return the number that this thread's next autograd node will get."""
    return torch._C._autograd._get_sequence_nr()


def node_number(node: Any) -> int:
    """Return the number of an autograd node, which rises with its making; leaves have the greatest."""
    return node._sequence_nr()


def is_leaf_node(node: Any) -> bool:
    """Whether the node accumulates into ``.grad``."""
    return node._sequence_nr() == LEAF_NODE_NUMBER


LEAF_NODE_NUMBER = 2**64 - 1


def node_of(tensor: torch.Tensor) -> Any:
    """Return the node that a tensor's gradient flows into."""
    return torch.autograd.graph._get_grad_fn_or_grad_acc(tensor)


def address_of(value: Any) -> int:
    """Return the address of a tensor's implementation, which outlives its Python half; 0 for others."""
    return value._cdata if isinstance(value, torch.Tensor) else 0


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor has a storage that can be asked for."""
    is_strided = tensor.layout is torch.strided
    return is_strided and torch._C._has_storage(tensor) and device_of(tensor).type != "meta"


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return the address of a storage's implementation, shared by all tensors on it."""
    return storage._cdata


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8)


def bytes_of_storage(storage: Any) -> torch.Tensor:
    """Return all bytes of a storage."""
    return tensor_on(storage, torch.uint8, 0, (storage.nbytes(),), (1,))


def fill_storage(storage: Any, byte: int) -> None:
    """Set every byte of a storage."""
    storage.fill_(byte)


def saved_for_backward(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors that the graph behind a tensor keeps."""
    stack, seen = [tensor.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        stack.extend(following for following, _ in node.next_functions)
        names = [name for name in dir(node) if name.startswith("_saved_")]
        for name in ("saved_tensors", *names):
            with suppress(RuntimeError, AttributeError):  # released already, or no such thing
                value = getattr(node, name)
                values = value if isinstance(value, (tuple, list)) else (value,)
                yield from (each for each in values if type(each) in PLAIN_TENSORS)
        if hasattr(node, "variable"):
            yield node.variable


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that a subclass wraps."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    inner = [getattr(tensor, name) for name in flatten()[0]] if flatten is not None else []
    return [each for each in inner if isinstance(each, torch.Tensor)]


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` on the caller's stream when the backward that runs now has finished."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def is_python_subclass(types: tuple[type, ...]) -> bool:
    """Whether a dispatched call has a tensor subclass with a meaning of its own among its types."""
    return not PLAIN_TENSORS.issuperset(types)


PLAIN_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter, torch.nn.Buffer))


def never_compiled(function: _Function) -> _Function:
    """Let Dynamo leave out a function of ours, and all that it calls, in the code that it compiles.

    Where torch 2.11 does not compile a frame it tries those that the frame calls, ours among them.
    """
    eval_frame = torch._C._dynamo.eval_frame
    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


class CompilableMode(python_dispatch.TorchDispatchMode):
    """A dispatch mode under which Dynamo compiles: under others it silently falls back to eager."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: compiled regions may run under this mode."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def isolate_threads(*, isolate: bool) -> None:
    """Give each thread a registry of groups of its own, or one to all."""
    getattr(torch._C._distributed_c10d, "_set_thread_isolation_mode")(isolate)  # noqa: B009  untyped


collect_garbage = gc.collect
"""Collect what the world has left in cycles; inside a world nothing else is looked at."""

COLLECTIONS = 8
"""Collections after which what still makes garbage has to be content."""


def collect_all_garbage() -> None:
    """Collect until nothing dies any more.

    Why more than once: a cycle that leads through a graph may be freed as far as the graph only, and
    be garbage that can be seen to its end from then on.
    """
    for _ in range(COLLECTIONS):
        if not collect_garbage():
            return


@contextmanager
def process_wide() -> Iterator[Patches]:
    """Hold the process-wide switches of a world, and undo every replacement at its end."""
    patches = Patches()
    isolate_threads(isolate=True)
    patches.on_exit(lambda: isolate_threads(isolate=False))
    if gc.isenabled():
        gc.disable()
        patches.on_exit(gc.enable)
    gc.freeze()  # what was there before stays out of collections: they are short and always the same
    patches.on_exit(gc.unfreeze)
    patches.replace(sys, "excepthook", sys.excepthook)  # init_process_group wraps it for each rank
    patches.replace(torch.autograd.profiler, "_is_profiler_enabled", value=True)
    patches.replace(FakeProcessGroup, "supports_coalescing", property(lambda _: True))
    for name, value in zip(_DISPATCH_FLAGS, get_dispatch_flags(), strict=True):
        if value is not MISSING:
            patches.replace(python_dispatch, name, value)
    patches.on_exit(_forget_traced_functions)
    try:
        yield patches
    finally:
        patches.undo()


def _forget_traced_functions() -> None:
    """Let Dynamo look up again what it does with streams' functions: it remembers them by identity."""
    dynamo = sys.modules.get("torch._dynamo.variables.torch")
    if dynamo is not None:
        dynamo.TorchInGraphFunctionVariable._get_handlers.cache_clear()


original_resize = torch.UntypedStorage.resize_
device_of = torch._C.TensorBase.device.__get__
"""A tensor's real device, whatever ``Tensor.device`` has been replaced by."""
is_on_cpu: Callable[[torch.Tensor], bool] = vars(torch._C.TensorBase)["is_cpu"].__get__
"""Whether a tensor's real device is the CPU; its name takes ten times as long."""


def run_composite(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator's own kernel (not through the dispatcher, which would leave out the mode).

    Asking for a kernel that does not exist crashes the process, hence the test.
    """
    composite = torch._C.DispatchKey.CompositeExplicitAutograd
    has = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeExplicitAutograd")
    return func._op_dk(composite if has else torch._C.DispatchKey.CPU, *args, **kwargs)


def is_composite(func: Any) -> bool:
    """Whether an operator is a composition of others, with no kernel of its own."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    name = func.name()
    return has(name, "CompositeImplicitAutograd") and not has(name, "CPU")


def higher_order_kernel(func: Any) -> Any:
    """Return the plain kernel of a higher-order operator."""
    keys = torch._C.DispatchKey
    for key in (keys.CPU, keys.CompositeExplicitAutograd, keys.BackendSelect):
        if key in func.py_kernels:
            return func.py_kernels[key]
    raise NotImplementedError(f"the simulator cannot run the higher-order operator {func.name()!r}")


def seed_everything(seed: int) -> None:
    """Start each random number generator from ``seed``; numpy's only if it is imported."""
    torch.default_generator.set_state(torch.Generator().manual_seed(seed).get_state())
    random.seed(seed)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.set_bit_generator(numpy_random.MT19937(seed))


class below_dispatch:  # noqa: N801  used as a function
    """Run operators that are no ops of a rank: neither its dispatch mode nor autograd sees them."""

    __slots__ = ("_guard", "_had_grad")

    def __enter__(self) -> None:
        self._guard = torch._C._DisableTorchDispatch()
        self._guard.__enter__()
        self._had_grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # noqa: FBT003  as it is declared

    def __exit__(self, *_: object) -> None:
        torch._C._set_grad_enabled(self._had_grad)
        self._guard.__exit__(None, None, None)


def tensor_on(
    storage: Any, dtype: Any, offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]
) -> torch.Tensor:
    """Return a tensor on a storage, with a version counter of its own."""
    return torch.empty(0, dtype=dtype).set_(storage, offset, sizes, strides)


_UNFORESEEABLE = (
    torch.Tag.nondeterministic_seeded,
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
    torch.Tag.inplace_view,
)


def is_foreseeable(func: Any) -> bool:
    """Whether what an operator returns, but for its values, follows from its arguments' shapes."""
    return not any(tag in func.tags for tag in _UNFORESEEABLE)


def outputs_without_values(func: Any, args: Any, kwargs: Any) -> tuple[Any, list[bool]]:
    """Return what an operator would return, without running it, and for each tensor whether it is new.

    Raises:
        NotImplementedError: it has no implementation that knows shapes alone.
    """
    written = {
        alias: value
        for argument, value in _by_argument(func, args, kwargs)
        if argument.alias_info is not None and argument.alias_info.is_write
        for alias in argument.alias_info.before_set
    }
    results = func(*_to_meta(args), **{**_to_meta(kwargs), **_meta_device(kwargs)})
    returns = func._schema.returns
    if len(returns) <= 1:
        out, fresh = _materialise(results, returns[0] if returns else None, written)
        return out, fresh
    pairs = [_materialise(each, how, written) for each, how in zip(results, returns, strict=True)]
    return tuple(out for out, _ in pairs), [new for _, fresh in pairs for new in fresh]


def _by_argument(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    arguments = func._schema.arguments
    yield from zip(arguments, args, strict=False)
    yield from (
        (argument, kwargs[argument.name]) for argument in arguments if argument.name in kwargs
    )


def _meta_device(kwargs: Any) -> dict[str, Any]:
    return {"device": torch.device("meta")} if kwargs.get("device") is not None else {}


def _to_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, (list, tuple)):
        return [_to_meta(item) for item in value]
    if isinstance(value, dict):
        return {key: _to_meta(item) for key, item in value.items()}
    return value


def _materialise(result: Any, how: Any, written: dict[str, Any]) -> tuple[Any, list[bool]]:
    """Return the argument that a result is, or new memory of its shape."""
    if how is not None and how.alias_info is not None:
        (alias,) = how.alias_info.before_set
        if alias not in written:
            raise NotImplementedError("an operator that returns a view")
        same = written[alias]
        return same, [False] * (len(same) if isinstance(same, (list, tuple)) else 1)
    if isinstance(result, torch.Tensor):
        out = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype)
        return out, [True]
    if isinstance(result, (list, tuple)):
        return [_materialise(each, None, {})[0] for each in result], [True] * len(result)
    return result, []


class Schema(NamedTuple):
    """What an operator says of itself.

    Attributes:
        namespace: "aten", "c10d", ...
        name: without namespace and overload.
        full_name: with the overload, unless it is the default.
        writes: for each argument by name, whether it is written, None where it holds no tensor; in
            the order of the arguments.
        returns_alias: some result shares memory with an argument.
        returns_new: some result does not, as far as the schema says.
        result_count: number of results.
    """

    namespace: str
    name: str
    full_name: str
    writes: dict[str, bool | None]
    returns_alias: bool
    returns_new: bool
    result_count: int


def name_of(func: Any) -> str:
    """Return the name of an operator without its namespace and overload."""
    return str(getattr(func, "_opname", func.name()))


def is_download(func: Any, args: Any, kwargs: Any, out: Any) -> bool:
    """Whether the host has waited for a conversion that copies from a device to it."""
    if name_of(func) != "_to_copy" or kwargs.get("non_blocking", False):
        return False
    return device_of(out).type == "cpu" and device_of(args[0]).type not in ("cpu", "meta")


def runner_of(func: Any) -> Callable[..., Any]:
    """Return what runs a plain operator, at less cost than calling the operator."""
    runner: Callable[..., Any] = func._op
    return runner


def is_higher_order(func: Any) -> bool:
    """Whether it is an operator that takes functions, which has no schema of this kind."""
    return isinstance(func, torch._ops.HigherOrderOperator)


def schema_of(func: Any) -> Schema:
    """Return what a plain operator says of itself."""
    name, overload = func._opname, func._overloadname
    writes = {arg.name: _writes(arg) for arg in func._schema.arguments}
    aliases = [result.alias_info is not None for result in func._schema.returns]
    full_name = name if overload in ("default", "") else f"{name}.{overload}"
    return Schema(
        func.namespace, name, full_name, writes, any(aliases), not all(aliases), len(aliases)
    )


def _writes(argument: Any) -> bool | None:
    if "Tensor" not in str(argument.type):
        return None
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


_ARGUMENTS: dict[int, tuple[tuple[str, ...], dict[str, Any]]] = {}
"""Names and default values of an operator's arguments, by its identity: operators live on."""


def named_arguments(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return all arguments by name; the dispatcher strips those that equal their default."""
    known = _ARGUMENTS.get(id(func))
    if known is None:
        schema = func._schema.arguments
        names = tuple(arg.name for arg in schema)
        known = _ARGUMENTS[id(func)] = (names, {arg.name: arg.default_value for arg in schema})
    names, defaults = known
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


def gather_asynchronously(fsdp_module: Any) -> None:
    """Make an FSDP2 module gather by asynchronous collectives (torch 2.11 to 2.13)."""
    fsdp_module._set_unshard_async_op(async_op=True)
