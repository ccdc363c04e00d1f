"""Groups: what torch.distributed's start-up, groups and DDP's hooks mean inside a world."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch.distributed as dist

from fsdp_sim.engine import machine as machines
from fsdp_sim.engine import patches, process_group, threads
from fsdp_sim.engine.group_calls import Parts
from fsdp_sim.engine.machine import LOCAL, Machine
from fsdp_sim.engine.store import Contents, program_stores
from fsdp_sim.engine.work import WorkFuture, collect_all, join_before_backward_ends

BACKENDS = ("gloo", "nccl", patches.BACKEND)
"""Backends that a program may ask for: each is played by the simulator's own, with NCCL's meaning."""


def install_stores(undo: patches.Patches, contents: Contents) -> None:
    """Let stores that the program makes be the world's; ``undo`` puts all names back."""
    for name, store in program_stores(contents).items():
        for owner in patches.STORE_OWNERS:
            undo.replace(owner, name, store)


def install(undo: patches.Patches) -> None:
    """Install the rest of what this file says; ``undo`` puts all names back."""
    undo.replace_wrapped(patches.INIT_PROCESS_GROUP, _init_process_group)
    undo.replace_wrapped(patches.NEW_GROUP, _new_group)
    undo.replace_wrapped(patches.SPLIT_GROUP, _split_group)
    undo.wrap(patches.RPC, "init_rpc", _without_rpc)
    for owner in patches.MONITORED_BARRIER_OWNERS:
        undo.replace(owner, "monitored_barrier", monitored_barrier)
    for name in patches.METHODS_WITH_REDUCE_OP:
        undo.wrap(patches.ProcessGroup, name, _keeping_reduction)
    undo.replace(patches.ProcessGroup, "_start_coalescing", process_group.start_coalescing)
    undo.replace(patches.ProcessGroup, "_end_coalescing", process_group.end_coalescing)
    for name in ("register_comm_hook", "_register_builtin_comm_hook"):
        undo.wrap(patches.DistributedDataParallel, name, _HOOKS[name])
    undo.wrap(patches.FUTURES, "_collect_all", _collecting)
    undo.replace(patches.DEBUG_LEVEL_OWNER, "get_debug_level", lambda: patches.DEBUG_OFF)
    patches.replace_collectives(undo, _answering, _refuse)


# ---------------------------------------------------------------------- start-up


def _init_process_group(original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        machine = machines.current()
        if machine is None:
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        named = bound.arguments
        check_backend(named["backend"])
        _check_place(machine, named["rank"], named["world_size"])
        _check_rest(named)
        if not dist.is_initialized():
            return _start(machine, original)
        if machine.has_adopted_group:
            raise ValueError("trying to initialize the default process group twice!")
        machine.has_adopted_group = True
        if machine.gpu is not None:
            patches.bind_device(named.get("device_id"))
        return None

    return init_process_group


def _without_rpc(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init_rpc(*args: Any, **kwargs: Any) -> None:
        if machines.current() is not None:
            raise NotImplementedError(
                "torch.distributed.rpc is not simulated, got init_rpc: its calls run on threads that no "
                "rank sees; a simulated program must do without it"
            )
        original(*args, **kwargs)

    return init_rpc


def start(machine: Machine) -> None:
    """Give a rank its default process group, before its program begins."""
    dist.init_process_group(patches.BACKEND)
    machine.has_adopted_group = False


def _start(machine: Machine, original: Callable[..., None]) -> None:
    """Make the default group; every time on keys of its own in the world's store."""
    machine.init_count += 1
    original(
        patches.BACKEND,
        rank=machine.rank.index,
        world_size=len(machine.rank.world.ranks),
        store=patches.PrefixStore(f"start {machine.init_count}", machine.wire.store),
    )
    machine.has_adopted_group = True


def check_backend(backend: Any) -> None:
    """Refuse a backend that the simulator does not play.

    Raises:
        ValueError: a backend other than ``BACKENDS`` or a map of devices to these.
    """
    for part in str(backend).lower().split(",") if backend else ():
        name = part.rsplit(":", 1)[-1].strip()
        if name not in (*BACKENDS, "undefined"):
            raise ValueError(
                f"backend must be None, one of {', '.join(BACKENDS)}, or a map of devices to these "
                f"in a simulated world, got {str(backend)!r}"
            )


def _check_place(machine: Machine, rank: int, world_size: int) -> None:
    index, count = machine.rank.index, len(machine.rank.world.ranks)
    if rank not in (-1, index):
        raise ValueError(
            f"init_process_group: rank must be {index}, the simulated rank, got {rank}"
        )
    if world_size not in (-1, count):
        raise ValueError(
            f"init_process_group: world_size must be {count}, as in the simulated world, "
            f"got {world_size}"
        )


def _check_rest(named: dict[str, Any]) -> None:
    if named["store"] is not None and named["init_method"] is not None:
        raise AssertionError("Cannot specify both init_method and store.")
    if named.get("_ranks"):
        raise NotImplementedError("init_process_group(_ranks=...) is not simulated")


# ---------------------------------------------------------------------- groups


def _new_group(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def new_group(*args: Any, **kwargs: Any) -> Any:
        machine = machines.current()
        if machine is None:
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        check_backend(bound.arguments.get("backend"))
        bound.arguments["backend"] = None
        group = original(*bound.args, **bound.kwargs)
        if not bound.arguments.get("use_local_synchronization"):
            everybody = patches.group_ranks(dist.group.WORLD)
            ranks = bound.arguments.get("ranks") or everybody
            is_sorted = bound.arguments.get("sort_ranks", True)
            parts = (tuple(sorted(ranks) if is_sorted else ranks),)
            _note(machine, "new_group", dist.group.WORLD, parts)
        return group

    return new_group


def _split_group(original: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch's own needs an accelerator: here every group can be split."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def split_group(*args: Any, **kwargs: Any) -> Any:
        machine = machines.current()
        if machine is None:
            return original(*args, **kwargs)
        named = signature.bind(*args, **kwargs).arguments
        check_backend(named.get("backend"))
        split_ranks = named.get("split_ranks")
        if not split_ranks:
            raise ValueError("split_ranks cannot be None or empty")
        parent = named.get("parent_pg") or dist.group.WORLD
        parts = _parts(patches.group_ranks(parent), split_ranks)
        name = _note(machine, "split_group", parent, parts)
        machine.wire.group_calls.await_all(machine.rank, "split_group", name)
        mine = next((part for part in parts if machine.rank.index in part), None)
        return None if mine is None else patches.new_local_group(mine, named.get("group_desc"))

    return split_group


def _note(machine: Machine, verb: str, parent: Any, parts: Parts) -> str:
    """Compare a call that makes groups with the other ranks'; return the parent's name."""
    name = process_group.communicator_of(machine, parent).name
    among = patches.group_ranks(parent)
    source = machines.caller()
    finding = machine.wire.group_calls.note(machine.rank.index, verb, name, among, parts, source)
    if finding is not None:
        machine.analysis.add(finding)
        machine.fail(finding)
    return name


def _parts(parent: Sequence[int], split_ranks: Sequence[Sequence[int]]) -> Parts:
    """Return the global ranks of each part; parts are given in the parent's ranks."""
    for part in split_ranks:
        if not part:
            raise ValueError("the split group cannot be empty")
        if len(part) != len(set(part)):
            raise ValueError("the split group cannot have duplicate ranks")
        if not 0 <= min(part) <= max(part) < len(parent):
            raise ValueError(
                f"split_ranks must be ranks of the parent group, 0 to {len(parent) - 1}, got {part}"
            )
    return tuple(tuple(parent[each] for each in sorted(part)) for part in split_ranks)


def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:  # noqa: ARG001, FBT001, FBT002
    """Wait for all ranks of the group; who is missing is reported, as in every deadlock."""
    dist.barrier(group)


def _keeping_reduction(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keep what a call says of its reduction, of which the dispatched op shows only a part."""

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        machine = machines.current()
        if machine is None:
            return original(self, *args, **kwargs)
        machine.reduction = patches.reduction_of(kwargs.get("opts", args[-1] if args else None))
        try:
            return original(self, *args, **kwargs)
        finally:
            machine.reduction = None

    return call


def _answering(name: str, func: Any) -> Callable[..., Any]:
    """Return the kernel of a ``c10d`` operator: reached where no dispatch mode has answered it."""

    def answer(*args: Any, **kwargs: Any) -> Any:
        machine = machines.current()
        if machine is None or machine.sees_operators:
            _refuse()
        assert machine is not None
        return process_group.dispatch_collective(machine, name, func, args, kwargs)

    return answer


def _refuse(*_: Any) -> NoReturn:
    if LOCAL.started_by is not None:
        threads.refuse(LOCAL.started_by, "a collective")
    raise RuntimeError(
        "a collective must be called by a rank's own program, got another thread or a process group "
        "built by hand; call it on the rank's thread, on a group made with torch.distributed"
    )


def _collecting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Both ``collect_all`` and ``wait_all`` are made of this, and would forget what to join."""

    @functools.wraps(original)
    def collect(futures: Sequence[Any]) -> Any:
        is_ours = any(isinstance(each, WorkFuture) for each in futures)
        return collect_all(futures) if is_ours else original(futures)

    return collect


# ---------------------------------------------------------------------- DDP's communication hooks


def _observing_hook(original: Callable[..., Any]) -> Callable[..., Any]:
    """DDP's C++ waits for the Future that a hook returns, where nobody sees it: join it for DDP."""

    @functools.wraps(original)
    def register_comm_hook(self: Any, state: Any, hook: Callable[..., Any]) -> Any:
        machine = machines.current()
        if machine is None or not callable(hook):
            return original(self, state, hook)

        @functools.wraps(hook)
        def observed(state: Any, bucket: Any) -> Any:
            future = hook(state, bucket)
            if isinstance(future, WorkFuture):
                future.value()  # raises what a callback has raised: C++ would take it for a tensor
                join_before_backward_ends(machine, future)
            return future

        return original(self, state, observed)

    return register_comm_hook


def _joining_at_once(original: Callable[..., Any]) -> Callable[..., Any]:
    """DDP's built-in hooks go on in C++ when a Future is complete: it must be joined by then."""

    @functools.wraps(original)
    def register_builtin(self: Any, comm_hook_type: Any) -> Any:
        machine = machines.current()
        if machine is not None:
            machine.joins_futures_at_once = True
        return original(self, comm_hook_type)

    return register_builtin


_HOOKS = {
    "register_comm_hook": _observing_hook,
    "_register_builtin_comm_hook": _joining_at_once,
}
