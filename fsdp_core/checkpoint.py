"""Distributed checkpoint save / load.

A checkpoint is a directory written by `torch.distributed.checkpoint`, with true chunk metadata of
uneven shards, so it loads at another world size, with other placements and other unit boundaries.
Whatever is no tensor is stored as JSON: loading runs no code.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_core.agreement import raised_by_all
from fsdp_core.checkpoint_files import (
    Files,
    check_files,
    find,
    list_written,
    make_room,
    partial_of,
    put_in_place,
)
from fsdp_core.checkpoint_reader import PlainReader
from fsdp_core.model_entries import (
    check_model,
    decode_entry,
    model_entries,
    model_target,
    set_entry,
)
from fsdp_core.module import require_whole_model, units_in
from fsdp_core.optimizer_entries import (
    TEXTS,
    fit_options,
    optimizer_entries,
    optimizer_targets,
    saved_optimizer,
    set_options,
    set_state,
)


def save_checkpoint(model: nn.Module, optimizer: Optimizer, checkpoint_dir: str | Path) -> None:
    """Save model and optimizer, each rank its own shards, and rank 0 all that is not sharded.

    The directory is written under another name and takes its own when it is whole. A save that dies
    leaves the previous one as it was, or with `.old` after its name, where `load_checkpoint` finds it.

    Args:
        model: sharded.
        optimizer: of its sharded parameters.
        checkpoint_dir: on a file system that all ranks see; what a link points to is replaced, not
            the link.

    Ordering:
        Collective on the default process group; the host waits.

    Raises:
        ConfigError: `checkpoint_dir` is something else than a checkpoint, or a directory of each rank.
        UnsupportedError: a state that is neither a tensor nor what JSON can say, or a unit that is
            on some ranks only.
        OSError: a file cannot be written. Every rank raises what one of them does.
    """
    target = Path(checkpoint_dir).resolve()
    with raised_by_all():
        require_whole_model(model, "a checkpoint")
        entries = {**model_entries(model.state_dict()), **optimizer_entries(model, optimizer)}
        if dist.get_rank() == 0:
            make_room(target)
        else:
            entries = {key: each for key, each in entries.items() if isinstance(each, DTensor)}
    with _cause_raised():
        save(entries, storage_writer=FileSystemWriter(partial_of(target)))
    with raised_by_all():
        mine = list_written(target)
    parts: list[Files] = [{}] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    with raised_by_all():
        if dist.get_rank() == 0:
            put_in_place(target, parts)


def load_checkpoint(
    model: nn.Module,
    optimizer: Optimizer,
    checkpoint_dir: str | Path,
    *,
    sync_model_weights: bool = True,
) -> None:
    """Load model and optimizer in place.

    Everything is checked and read before anything is written: while it is read, this rank's rows of
    the main weights exist twice.

    Args:
        model: sharded in any way; its names and shapes must be those of the saved one.
        optimizer: of the same class and the same parameters; its groups may be split otherwise.
        checkpoint_dir: what `save_checkpoint` wrote.
        sync_model_weights: have compute weights follow the loaded main weights at the next gather.
            Otherwise those that are kept between passes stay as they are, until the main weights
            are written again.

    Ordering:
        Collective on the default process group; the host waits.

    Raises:
        ConfigError: no checkpoint there, a damaged file, an entry that is missing, left over or of
            another shape or dtype, or an optimizer that does not fit. Every rank raises what one of
            them does.
        UnsupportedError: a unit is on some ranks only.
    """
    with raised_by_all():
        require_whole_model(model, "a checkpoint")
        directory = find(Path(checkpoint_dir).resolve())
        checked = check_files(directory)
    with raised_by_all():
        reader = PlainReader(directory, checked)
        state = model.state_dict()
        keys = check_model(state, reader)
        texts = {key: reader.target_of(key) for key in TEXTS}
    with _cause_raised():
        load(texts, storage_reader=reader)
    with raised_by_all():
        saved = saved_optimizer(texts)
        new_options = fit_options(model, optimizer, saved)
        tensors = optimizer_targets(model, optimizer, saved, reader)
        read = {key: model_target(name, state[name], key, reader) for name, key in keys.items()}
    with _cause_raised():
        load({**read, **tensors}, storage_reader=reader)
    with raised_by_all():
        values = {name: decode_entry(key, read.pop(key)) for name, key in keys.items()}
    groups = [group for unit in units_in(model) for group in unit.groups]
    current = [group for group in groups if not group.is_stale]
    for name, value in values.items():
        set_entry(model, name, state[name], value)
    set_state(model, optimizer, saved, tensors)
    for options, new in zip(optimizer.param_groups, new_options, strict=True):
        set_options(options, new)
    for group in groups:
        group.mark_written()
    if not sync_model_weights:
        for group in current:
            group.mark_current()


@contextmanager
def _cause_raised() -> Iterator[None]:
    """Have every rank raise what the first rank that failed raised, instead of PyTorch's list of all.

    Why: that list is no `Exception`, so that a loop that goes on after a failed save would end.
    """
    try:
        yield
    except CheckpointException as failed:
        _, (cause, _) = min(failed.failures.items(), key=lambda each: each[0])
        raise cause from failed
