"""Every private PyTorch name that fsdp_core uses, and which versions have it.

Checked with torch 2.11 and 2.13. A name that one of them lacks is bridged here, so that no other
file asks for a version.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from operator import attrgetter
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions
from torch._C._dynamo import eval_frame
from torch._C._functorch import TransformType
from torch.amp import GradScaler
from torch.autograd import profiler
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.optim import optimizer

TESTED_VERSIONS = ("2.11", "2.13")
UNTESTED_VERSIONS = ("2.12", "2.14")


def check_torch_version(version: str) -> None:
    """Warn of a PyTorch version that is not run by our tests, and refuse one that is too far off.

    Raises:
        ImportError: neither a tested version nor one between or right behind them.
    """
    release = ".".join(version.split(".")[:2])
    if release in UNTESTED_VERSIONS:
        warnings.warn(
            f"fsdp_core is tested with PyTorch {' and '.join(TESTED_VERSIONS)}; {version} is untested",
            stacklevel=2,
        )
    elif release not in TESTED_VERSIONS:
        msg = (
            f"fsdp_core needs PyTorch {' or '.join(TESTED_VERSIONS)} "
            f"({' and '.join(UNTESTED_VERSIONS)} are let through untested), got {version}; install one"
        )
        raise ImportError(msg)


Function = TypeVar("Function", bound=Callable[..., Any])

# Collectives are asked of the process group itself: the functions of torch.distributed check and
# convert their arguments anew at each call, which takes a third of its time on a GPU.

# torch 2.12 renamed the two methods.
_RENAMED = hasattr(dist.ProcessGroup, "all_gather_single")
_GATHER = attrgetter("all_gather_single" if _RENAMED else "_allgather_base")
_REDUCE_SCATTER = attrgetter("reduce_scatter_single" if _RENAMED else "_reduce_scatter_base")
_GATHERED = AllgatherOptions()
_GATHERED.asyncOp = False
_SUMMED = ReduceScatterOptions()
_SUMMED.asyncOp = False
_SUMMED.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)


def all_gather_single(output: Tensor, shard: Tensor, process_group: dist.ProcessGroup) -> None:
    """Gather equal shards into one tensor on the current stream.

    Shapes:
        output: [W * S]; shard: [S], which may be this rank's slice of the output.
    """
    _complete(_GATHER(process_group)(output, shard, _GATHERED))


def reduce_scatter_single(output: Tensor, full: Tensor, process_group: dist.ProcessGroup) -> None:
    """Sum over ranks and keep this rank's shard, on the current stream.

    Shapes:
        output: [S], which may be this rank's slice of `full`; full: [W * S].
    """
    _complete(_REDUCE_SCATTER(process_group)(output, full, _SUMMED))


def _complete(work: dist.Work | None) -> None:
    """Have a collective complete on the current stream; NCCL's does so by itself and has no handle."""
    if work is not None:
        work.wait()  # gloo's host waits


class preserve_version:  # noqa: N801 - reads as the verb it is
    """Hide writes to a tensor and its views from autograd's in-place check, inside the scope.

    Refilling a storage with the bytes it had is no change of value, but autograd would see one
    and fail the backward of whatever saved a view of it.
    """

    __slots__ = ("_tensors", "_versions")

    def __init__(self, tensor: Tensor) -> None:
        self._tensors = (tensor,)
        self._versions = (tensor._version,)

    def __enter__(self) -> None:
        """The counter was noted already."""

    def __exit__(self, *_exception: object) -> None:
        """Put the counter back."""
        torch._C._autograd._unsafe_set_version_counter(self._tensors, self._versions)


# how often a tensor or a view of it was written in place
version_of: Callable[[Tensor], int] = attrgetter("_version")


def versions_of(tensors: Sequence[Tensor]) -> int:
    """Return how often all these tensors, or views of them, were written in place."""
    return sum(map(version_of, tensors))


def storage_holders(tensor: Tensor) -> int:
    """Return how many references there are to the storage of a tensor, this question's included."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def is_extra_state(name: str) -> bool:
    """Whether an entry of a state dict is what a module's `get_extra_state` gave."""
    return name.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the dict in which a module holds its own parameters."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the dict in which a module holds its own buffers."""
    return module._buffers


def flat_weights_of(module: nn.Module) -> dict[str, Any]:
    """Return the attributes in which a recurrent module lists its parameters a second time."""
    held = vars(module)
    return {name: held[name] for name in ("_flat_weights", "_flat_weight_refs") if name in held}


def forget_weak_references(module: nn.Module) -> None:
    """Have a recurrent module forget its weak references to its parameters.

    Why: a tensor with weak references takes no other contents.
    """
    references = vars(module).get("_flat_weight_refs")
    if references is not None:
        vars(module)["_flat_weight_refs"] = [None] * len(references)


def post_accumulate_hooks(tensor: Tensor) -> list[Callable[[Tensor], None]]:
    """Return what users registered with `register_post_accumulate_grad_hook`, in order."""
    hooks = tensor._post_accumulate_grad_hooks
    return list(hooks.values()) if hooks else []


_POST_ACCUMULATE_HOOKS = attrgetter("_post_accumulate_grad_hooks")


def any_post_accumulate_hooks(tensors: Iterable[Tensor]) -> bool:
    """Whether users registered such a hook on one of these."""
    return any(map(_POST_ACCUMULATE_HOOKS, tensors))


def optimizer_step_pre_hooks() -> list[Callable[..., Any]]:
    """Return what was registered with `register_optimizer_step_pre_hook`, in order."""
    return list(optimizer._global_optimizer_pre_hooks.values())


_UNSCALES_THROUGH = "_fsdp_core_unscales_through"


def unscale_through(unscale: Callable[[optimizer.Optimizer, Callable[[Any], Any]], Any]) -> None:
    """Have `unscale` called where a GradScaler unscales gradients, with the optimizer and PyTorch's way.

    Both return what was found on each device. Why no hook: PyTorch has none there.

    Source: GradScaler._unscale_grads_, torch 2.11 and 2.13.
    """
    own: Any = GradScaler._unscale_grads_
    if hasattr(own, _UNSCALES_THROUGH):
        return

    @wraps(own)
    def through(scaler: GradScaler, holder: optimizer.Optimizer, *args: Any) -> Any:
        return unscale(holder, lambda other: own(scaler, other, *args))

    setattr(through, _UNSCALES_THROUGH, unscale)
    GradScaler._unscale_grads_ = through  # type: ignore[method-assign, assignment]


def norms_of(tensors: list[Tensor], norm_type: float) -> Tensor:
    """Return the norm of each tensor, computed and returned in fp32.

    Shapes:
        result: [number of tensors].
    """
    return torch.stack(torch._foreach_norm(tensors, norm_type, dtype=torch.float32))


def attach_chunk(local: Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    """Tell checkpoints which box of its DTensor a local tensor holds.

    Why: a DTensor's own arithmetic assumes even shards. It asks its local tensor first.

    Source: DTensor.__create_write_items__ and __create_chunk_list__, torch 2.13.
    """
    chunk = (offsets, sizes)
    setattr(local, "__create_write_items__", partial(_write_items, chunk))  # noqa: B010
    setattr(local, "__create_chunk_list__", partial(_chunks, chunk))  # noqa: B010


Box = tuple[tuple[int, ...], tuple[int, ...]]


def _chunks(box: Box) -> list[Any]:
    """Return the chunks that a rank holds: one, or none."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    if 0 in box[1]:
        return []
    return [ChunkStorageMetadata(torch.Size(box[0]), torch.Size(box[1]))]


def _write_items(box: Box, fqn: str, dtensor: DTensor) -> list[Any]:
    """Return what a rank writes of a tensor: its chunk, or nothing."""
    from torch.distributed.checkpoint import metadata, planner

    properties = metadata.TensorProperties.create_from_tensor(dtensor.to_local())
    return [
        planner.WriteItem(
            index=metadata.MetadataIndex(fqn, chunk.offsets),
            type=planner.WriteItemType.SHARD,
            tensor_data=planner.TensorWriteData(
                chunk=chunk, properties=properties, size=dtensor.size()
            ),
        )
        for chunk in _chunks(box)
    ]


def orthogonalize(
    matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Return the nearest orthogonal matrix, roughly, as `torch.optim.Muon` computes it.

    Source: Newton-Schulz iteration of torch.optim._muon, torch 2.13.
    """
    from torch.optim import _muon

    return _muon._zeropower_via_newtonschulz(matrix, coefficients, steps, eps)


def adjusted_learning_rate(lr: float, rule: str | None, shape: torch.Size) -> float:
    """Return the learning rate of a matrix by its shape, as `torch.optim.Muon` computes it."""
    from torch.optim import _muon

    return _muon._adjust_lr(lr, rule, shape)


def cuda_stream_handle(device_index: int) -> int | None:
    """Return CUDA's handle of the current stream of a device; None where PyTorch cannot say it."""
    ask = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return None if ask is None else int(ask(device_index))


# The functions themselves, since each is asked for every gradient or call:
# whether a profiler listens to `record_function` ranges
profiler_is_enabled: Callable[[], bool] = partial(attrgetter("_is_profiler_enabled"), profiler)
# the number of the backward pass that this thread runs, the innermost; -1 if none
current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
# the sequence number that this thread's next autograd node will get
next_node_number: Callable[[], int] = torch._C._autograd._get_sequence_nr


def in_graph_task() -> bool:
    """Whether this thread is inside a backward pass of the autograd engine."""
    return current_graph_task() != -1


def in_grad_transform() -> bool:
    """Whether this thread is inside `torch.func.grad`, or a transform that is made of it."""
    stack = torch._C._functorch.get_interpreter_stack()
    return stack is not None and any(each.key() == TransformType.Grad for each in stack)


# Whether two tensors are over the same storage; not those that have none, such as sparse ones.
shares_storage: Callable[[Tensor, Tensor], bool] = torch._C._is_alias_of  # type: ignore[attr-defined]


def base_of(tensor: Tensor) -> Tensor | None:
    """Return the tensor that this one is a view of, as autograd sees it; None if it is no view."""
    return tensor._base


class _Nothing(torch.autograd.Function):
    """Leads to a tensor's autograd node, and computes nothing."""

    @staticmethod
    def forward(_ctx: Any, _tensor: Tensor) -> Tensor:
        """Return no values."""
        return torch.empty(0)


_STAYS_LAST = "_fsdp_core_stays_last"


def mark_last(hook: Any) -> None:
    """Mark a forward hook as one that is to run behind all others of its module."""
    setattr(hook, _STAYS_LAST, True)


def keep_marked_last(module: nn.Module) -> None:
    """Have the hooks that were marked run behind those that were registered since then."""
    hooks = module._forward_hooks
    for number in [each for each, hook in hooks.items() if hasattr(hook, _STAYS_LAST)]:
        hooks.move_to_end(number)  # type: ignore[attr-defined]


def accumulation_of(leaf: Tensor) -> Any:
    """Return the autograd node that accumulates gradients into a leaf.

    Why not `get_gradient_edge`: it makes a view of the leaf, which uneven DTensors refuse.
    Why the output is held: on torch 2.11 its node ends with it.
    """
    with torch.enable_grad():  # a reentrant checkpoint runs its forward without gradients
        output: Any = _Nothing.apply(leaf)  # type: ignore[no-untyped-call]
    return output.grad_fn.next_functions[0][0]


def is_made_since(tensor: Tensor, first_node: int) -> bool:
    """Whether this thread made a tensor's autograd node, and not before `first_node`."""
    node = tensor.grad_fn
    return node is not None and node._sequence_nr() >= first_node


def has_reentrant_checkpoint(outputs: Sequence[Tensor], first_node: int) -> bool:
    """Whether a graph holds a checkpoint that runs a backward pass of its own.

    Args:
        outputs: where the walk begins.
        first_node: nodes with a lower sequence number are not looked at.
    """
    stack = [tensor.grad_fn for tensor in outputs]
    seen: dict[Any, None] = {}
    while stack:
        node = stack.pop()
        if node is None or node in seen or node._sequence_nr() < first_node:
            continue
        seen[node] = None
        if "Checkpoint" in node.name():
            return True
        stack.extend(each for each, _ in node.next_functions)
    return False


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Run `callback` when the outermost backward pass that is running has finished."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def local_tensor(dtensor: DTensor) -> Tensor:
    """Return the very tensor that a DTensor wraps; `to_local` returns a view of it."""
    return dtensor._local_tensor


def wrap_instead(dtensor: Tensor, local: Tensor) -> None:
    """Let a DTensor wrap another tensor, which must be over the same memory."""
    assert isinstance(dtensor, DTensor)
    dtensor._local_tensor = local


def never_compiled(function: Function) -> Function:
    """Mark a function, and all that it calls, as one that torch.compile leaves as it is.

    Why not `torch.compiler.disable`: it imports the compiler, which takes as long as PyTorch.
    """
    strategy = eval_frame._FrameExecStrategy(
        eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP
    )
    plain: Any = function
    eval_frame.set_code_exec_strategy(plain.__code__, strategy)
    plain._torchdynamo_disable = True
    return function


def is_assigning_load(local_metadata: dict[str, Any]) -> bool:
    """Whether `load_state_dict` was called with `assign=True`.

    Args:
        local_metadata: what PyTorch hands to a load-state-dict pre-hook.
    """
    return bool(local_metadata.get("assign_to_params_buffers", False))
