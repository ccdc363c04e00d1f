"""Entries of an optimizer: it must be the one that was saved, or nothing is loaded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.optim import Optimizer

import fsdp_core
from fsdp_core import ConfigError
from tests.cases.programs import assert_equal, fill, local_rows, shard
from tests.core.saved_models import (
    Tied,
    adamw,
    build,
    edit_metadata,
    load,
    refused,
    save,
    train,
)
from tests.core.worlds import on_ranks

OTHER_PARAMETERS = (
    "the optimizer must hold the parameters that were saved with it, got 2 {}; build it with the "
    "same parameters"
)
OTHER_OPTIONS = (
    "parameters of one optimizer group must have been saved with the same options, got another 'lr' "
    "for 'second.weight' than for 'first.weight' in param_groups[0]; split the group as it was when "
    "it was saved"
)


def without_second(model: nn.Module) -> Optimizer:
    """Of the first layer alone."""
    return torch.optim.AdamW(model.get_submodule("first").parameters(), lr=0.5)


def in_two_groups(model: nn.Module) -> Optimizer:
    """Each layer its own learning rate."""
    first, second = model.get_submodule("first"), model.get_submodule("second")
    groups = [{"params": first.parameters(), "lr": 0.5}, {"params": second.parameters(), "lr": 1.0}]
    return torch.optim.AdamW(groups)


def sgd(model: nn.Module) -> Optimizer:
    """Another class."""
    return torch.optim.SGD(model.parameters(), lr=0.5)


@pytest.mark.everywhere
@pytest.mark.parametrize(
    ("saved", "other", "message"),
    [
        (
            sgd,
            adamw,
            "the optimizer must be of the class that was saved, SGD, got AdamW; pass one of that class",
        ),
        (without_second, adamw, OTHER_PARAMETERS.format("more: 'second.weight', 'second.bias'")),
        (adamw, without_second, OTHER_PARAMETERS.format("fewer: 'second.bias', 'second.weight'")),
        (in_two_groups, adamw, OTHER_OPTIONS),
    ],
    ids=["class", "more", "fewer", "options"],
)
def test_an_optimizer_that_does_not_fit_is_refused_before_the_model_is_written(
    tmp_path: Path,
    saved: Callable[[nn.Module], Optimizer],
    other: Callable[[nn.Module], Optimizer],
    message: str,
) -> None:
    """On every rank; neither the weights nor the optimizer are touched."""

    def body(_rank: int) -> str:
        model = fill(Tied())
        shard(model, ("first", "third"), "second")
        optimizer = fsdp_core.fully_shard_optimizer(saved(model))
        train(model, optimizer, range(1))
        fsdp_core.save_checkpoint(model, optimizer, tmp_path / "saved")
        train(model, optimizer, range(1, 2))
        optimizer = fsdp_core.fully_shard_optimizer(other(model))
        before, options = local_rows(model), [dict(each) for each in optimizer.param_groups]
        with pytest.raises(ConfigError) as caught:
            fsdp_core.load_checkpoint(model, optimizer, tmp_path / "saved")
        assert_equal(local_rows(model), before)
        assert not optimizer.state
        assert optimizer.param_groups == options
        return str(caught.value)

    assert on_ranks(body, 2) == [f"{message}; nothing was loaded"] * 2


@pytest.mark.everywhere
def test_groups_may_be_split_otherwise(tmp_path: Path) -> None:
    """Options follow the parameters."""

    def body(_rank: int) -> list[float]:
        model = fill(Tied())
        shard(model, ("first", "third"), "second")
        fsdp_core.save_checkpoint(model, adamw(model), tmp_path / "saved")
        optimizer = in_two_groups(model)
        fsdp_core.load_checkpoint(model, optimizer, tmp_path / "saved")
        return [group["lr"] for group in optimizer.param_groups]

    assert on_ranks(body, 2) == [[0.5, 0.5]] * 2


@pytest.mark.everywhere
@pytest.mark.parametrize("action", [fsdp_core.save_checkpoint, fsdp_core.load_checkpoint])
def test_an_optimizer_of_another_model_is_refused(
    tmp_path: Path, action: Callable[[nn.Module, Optimizer, Path], None]
) -> None:
    """Before anything is written, to the disk or to the model."""
    expected = save(tmp_path / "saved")

    def body(_rank: int) -> str:
        model, _ = build()
        _, optimizer = build()
        before = local_rows(model)
        with pytest.raises(ConfigError) as caught:
            action(model, optimizer, tmp_path / "saved")
        assert_equal(local_rows(model), before)
        return str(caught.value)

    message = (
        "the optimizer must hold parameters of the model, got one of shape (6, 2) that is none; pass "
        "the model and the optimizer that belong together"
    )
    assert on_ranks(body, 2) == [message] * 2
    assert_equal(load(tmp_path / "saved"), expected)


ENTRY = "optimizer.state.second.weight.exp_avg"


def lose(metadata: Metadata) -> None:
    """Drop an entry."""
    del metadata.state_dict_metadata[ENTRY]


def gain(metadata: Metadata) -> None:
    """Have one twice, for a parameter that there is not."""
    entries = metadata.state_dict_metadata
    entries["optimizer.state.fourth.exp_avg"] = entries[ENTRY]


def gain_key(metadata: Metadata) -> None:
    """Have one twice, under a key that the optimizer does not know."""
    entries = metadata.state_dict_metadata
    entries["optimizer.state.second.weight.more"] = entries[ENTRY]


def reshape(metadata: Metadata) -> None:
    """Say that an entry has another shape."""
    entry: Any = metadata.state_dict_metadata[ENTRY]
    entry.size = torch.Size((3, 4))


def retype(metadata: Metadata) -> None:
    """Say that an entry has another dtype."""
    entry: Any = metadata.state_dict_metadata[ENTRY]
    entry.properties.dtype = torch.float64


def pickle_it(metadata: Metadata) -> None:
    """Say that an entry is no tensor, but a pickle."""
    metadata.state_dict_metadata[ENTRY] = BytesStorageMetadata()


def drop_options(metadata: Metadata) -> None:
    """Say that the options are no tensor, but a pickle."""
    metadata.state_dict_metadata["optimizer.options"] = BytesStorageMetadata()


@pytest.mark.everywhere
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lose, f"no tensor {ENTRY!r}"),
        (gain, "1 entries that nobody saved: 'optimizer.state.fourth.exp_avg'"),
        (gain_key, "1 entries that nobody saved: 'optimizer.state.second.weight.more'"),
        (reshape, f"['torch.float32', 3, 4] for {ENTRY!r} instead of ['torch.float32', 2, 6]"),
        (retype, f"['torch.float64', 2, 6] for {ENTRY!r} instead of ['torch.float32', 2, 6]"),
        (pickle_it, f"no tensor {ENTRY!r}"),
        (drop_options, "no tensor 'optimizer.options'"),
    ],
)
def test_entries_that_somebody_edited_are_refused(
    tmp_path: Path, change: Callable[[Metadata], None], problem: str
) -> None:
    """Whatever the checksums say."""
    save(tmp_path / "saved")
    edit_metadata(tmp_path / "saved", change)

    refused(
        tmp_path / "saved",
        f"the checkpoint in {str(tmp_path / 'saved')!r} must be whole, got {problem}; load another "
        f"one; nothing was loaded",
    )
