"""Distributed checkpoint save / load.

A checkpoint is a directory written by `torch.distributed.checkpoint`, with true chunk metadata of
uneven shards, so it loads at another world size, with other placements and other unit boundaries.
Whatever is no tensor is stored as JSON: loading runs no code.
"""

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from fsdp_core.agreement import raised_by_all
from fsdp_core.checkpoint_files import (
    check_files,
    find,
    list_files,
    make_room,
    replace,
    write_manifest,
)
from fsdp_core.checkpoint_reader import PlainReader, buffer_of
from fsdp_core.json_tensors import decode
from fsdp_core.model_entries import check_model, entries_of, set_entry, target_of
from fsdp_core.module import units_in
from fsdp_core.optimizer_entries import (
    CLASS,
    OPTIONS,
    VALUES,
    fit_options,
    optimizer_state,
    set_options,
    set_state,
    targets_of,
)


def save_checkpoint(model: nn.Module, optimizer: Optimizer, checkpoint_dir: str | Path) -> None:
    """Save model and optimizer, each rank its own shards.

    The directory is written under another name and takes its own when it is whole. A save that dies
    leaves the previous one as it was, or with `.old` after its name, where `load_checkpoint` finds it.

    Args:
        model: sharded.
        optimizer: of its sharded parameters.
        checkpoint_dir: on a file system that all ranks see.

    Ordering:
        Collective on the default process group; the host waits.

    Raises:
        ConfigError: `checkpoint_dir` is something else than a checkpoint.
        UnsupportedError: a state that is neither a tensor nor what JSON can say.
        OSError: a file cannot be written. Every rank raises what one of them does.
    """
    target = Path(checkpoint_dir)
    partial = target.with_name(target.name + ".partial")
    with raised_by_all():
        state = {**entries_of(model.state_dict()), **optimizer_state(model, optimizer)}
        if dist.get_rank() == 0:
            make_room(target, partial)
    save(state, storage_writer=FileSystemWriter(partial))
    with raised_by_all():
        mine = list_files(partial)
    files: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(files, mine)
    with raised_by_all():
        if dist.get_rank() == 0:
            write_manifest(partial, files)
            replace(target, partial)


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

    Ordering:
        Collective on the default process group; the host waits.

    Raises:
        ConfigError: no checkpoint there, a damaged file, an entry that is missing, left over or of
            another shape or dtype, or an optimizer that does not fit. Every rank raises what one of
            them does.
        CheckpointException: a file cannot be read, on every rank.
    """
    with raised_by_all():
        directory = find(Path(checkpoint_dir))
        check_files(directory)
    with raised_by_all():
        reader = PlainReader(directory)
        metadata = reader.read_metadata()
        state = model.state_dict()
        keys = check_model(state, metadata, directory)
        texts = {key: buffer_of(metadata, key) for key in (CLASS, OPTIONS, VALUES)}
    load(texts, storage_reader=reader)
    with raised_by_all():
        name, options, values = map(decode, texts.values())
        new_options = fit_options(model, optimizer, name, options)
        optimizer_state = targets_of(model, optimizer, metadata)
        read = {key: target_of(name, state[name], metadata, key) for name, key in keys.items()}
    load({**read, **optimizer_state}, storage_reader=reader)
    for name, key in keys.items():
        set_entry(model, name, state[name], key, read.pop(key))
    set_state(model, optimizer, optimizer_state, values)
    for param_group, new in zip(optimizer.param_groups, new_options, strict=True):
        set_options(param_group, new)
    if sync_model_weights:
        for unit in units_in(model):
            for group in unit.groups:
                group.mark_written()
