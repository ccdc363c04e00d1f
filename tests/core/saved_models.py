"""What the tests of checkpoints save, and what they load it into."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.optim import Optimizer

import fsdp_core
from fsdp_core import ConfigError
from fsdp_core.checkpoint_files import MANIFEST, METADATA, checksum
from tests.cases.programs import (
    Tensors,
    assert_equal,
    batch,
    fill,
    local_rows,
    loss_of,
    put_together,
    shard,
)
from tests.core.worlds import on_ranks, once

VALUES_ALONE = {"knobs": ("values",)}
"""For worlds whose order other tests check."""

OTHER = 9.0
"""What weights are before they are loaded."""


class Tied(nn.Module):
    """Three layers side by side, of uneven shapes, of which two share a weight, and a buffer.

    Side by side, so that gradients are small integers whatever the weights are: their sums over any
    number of ranks are exact.
    """

    def __init__(self, rows: int = 6) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, rows), nn.Linear(rows, 2)
        self.third = nn.Linear(2, rows, bias=False)
        self.third.weight = self.first.weight
        self.register_buffer("count", torch.tensor([7]))

    def forward(self, x: Tensor) -> Tensor:
        """Return [1, rows + 2] of an input [1, 2]: what each layer makes of it, or of its copies."""
        copies = x.repeat(1, self.second.in_features)[:, : self.second.in_features]
        return torch.cat([self.first(x) + self.third(x), self.second(copies)], dim=1)


class Counting(nn.Module):
    """A layer with a state of its own that is no tensor, and one that is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.inner = nn.Linear(2, 2), Scale()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Count, and call the layer."""
        self.calls += 1
        y: Tensor = self.inner(self.layer(x))
        return y

    def get_extra_state(self) -> Any:
        """Return what JSON can say, of another length each time."""
        return {"calls": ["one"] * self.calls}

    def set_extra_state(self, state: Any) -> None:
        """Take it back."""
        self.calls = len(state["calls"])


class Scale(nn.Module):
    """A factor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.tensor([2.0])

    def forward(self, x: Tensor) -> Tensor:
        """Return x times the factor."""
        return x * self.factor

    def get_extra_state(self) -> Tensor:
        """Return the factor."""
        return self.factor

    def set_extra_state(self, state: Tensor) -> None:
        """Take it back."""
        self.factor = state


def adamw(model: nn.Module) -> Optimizer:
    """All parameters in one group."""
    return torch.optim.AdamW(model.parameters(), lr=0.5, betas=(0.5, 0.75))


def build(units: tuple[Any, ...] = ((("first", "third")), "second"), **options: Any) -> Any:
    """A sharded model and its optimizer."""
    model = fill(Tied())
    shard(model, *units, **options)
    return model, fsdp_core.fully_shard_optimizer(adamw(model))


def counting() -> tuple[Any, Optimizer]:
    """A sharded model of them, and its optimizer."""
    shard(model := fill(Counting()), "layer", "", mesh=(2,))
    return model, fsdp_core.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))


def overwrite(model: nn.Module) -> None:
    """Give every parameter other values."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(OTHER)


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    """Train on one batch for all ranks, so that every world size gives the same gradients."""
    for number in steps:
        loss_of(model(batch(0, number)), 0).backward()
        optimizer.step()
        optimizer.zero_grad()


def uninterrupted(steps: int) -> Tensors:
    """The weights of a run that was neither sharded nor stopped."""
    model = fill(Tied())
    train(model, adamw(model), range(steps))
    return {name: each.detach() for name, each in model.named_parameters()}


def save(directory: Path, steps: int = 2) -> Tensors:
    """Train and save on two ranks, train one step more; return the weights."""

    def body(_rank: int) -> Tensors:
        model, optimizer = build()
        train(model, optimizer, range(steps))
        fsdp_core.save_checkpoint(model, optimizer, str(directory))
        train(model, optimizer, range(steps, steps + 1))
        return local_rows(model)

    return put_together(on_ranks(body, 2, **VALUES_ALONE))


def save_anew(directory: Path) -> None:
    """Save a model as it begins, on this rank."""
    model, optimizer = build(mesh=(torch.distributed.get_world_size(),))
    fsdp_core.save_checkpoint(model, optimizer, directory)


def load(directory: Path, **options: Any) -> Tensors:
    """Load on two ranks over other weights, train a step; return the weights."""

    def body(_rank: int) -> Tensors:
        model, optimizer = build(**options)
        overwrite(model)
        fsdp_core.load_checkpoint(model, optimizer, str(directory))
        assert model.count.item() == 7
        train(model, optimizer, range(2, 3))
        return local_rows(model)

    return put_together(on_ranks(body, 2, **VALUES_ALONE))


def refused(
    directory: Path, *messages: str, prepare: Callable[[nn.Module], None] | None = None
) -> None:
    """Check that loading raises with these texts on both ranks, and changes not a bit.

    The optimizer has state and options of its own, the model a buffer that is not the saved one.
    """

    def body(_rank: int) -> str:
        model, optimizer = build()
        train(model, optimizer, range(5, 6))
        optimizer.param_groups[0]["lr"] = 0.25
        model.count.fill_(1)
        if prepare is not None:
            prepare(model)
        before = everything(model, optimizer)
        with pytest.raises(ConfigError) as caught:
            fsdp_core.load_checkpoint(model, optimizer, str(directory))
        assert_equal(everything(model, optimizer), before)
        assert optimizer.param_groups[0]["lr"] == 0.25
        return str(caught.value)

    for text in on_ranks(body, 2, **VALUES_ALONE):
        assert all(message in text for message in messages), text
        assert text.endswith("; nothing was loaded")


def everything(model: nn.Module, optimizer: Optimizer) -> Tensors:
    """Copies of this rank's rows of weights and of the optimizer's state, and of the buffers."""
    found = {**local_rows(model), **{name: each.clone() for name, each in model.named_buffers()}}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            local = value.to_local() if hasattr(value, "to_local") else value
            found[f"{name} {key}"] = local.clone()
    return found


def edit_metadata(directory: Path, change: Callable[[Metadata], None]) -> None:
    """Change the metadata of a checkpoint as somebody who writes a right manifest could."""

    def edit() -> None:
        path = directory / METADATA
        metadata = pickle.loads(path.read_bytes())
        change(metadata)
        path.write_bytes(pickle.dumps(metadata))
        put_in_manifest(path)

    once(edit)


def put_in_manifest(file: Path) -> None:
    """Let the manifest have a file's present size and checksum."""
    path = file.parent / MANIFEST
    manifest = json.loads(path.read_text())
    manifest["files"][file.name] = [file.stat().st_size, checksum(file)]
    path.write_text(json.dumps(manifest))
