"""Entries of a model: those of the checkpoint must be its own, or nothing is loaded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

import fsdp_core
from fsdp_core import ConfigError, MixedPrecisionPolicy
from fsdp_core.full_state import load_full_state_dict
from tests.cases.programs import fill, shard
from tests.core.saved_models import Tied, adamw, build, edit_metadata, refused, save
from tests.core.worlds import on_ranks

MUST_BE_THE_MODELS = "the checkpoint in {} must have the model's entries, got one that {}"
BUILD = "; build the model that was saved; nothing was loaded"


def add(model: nn.Module) -> None:
    """One buffer more."""
    model.register_buffer("more", torch.ones(1))


def drop(model: nn.Module) -> None:
    """One buffer less."""
    del model.count


def grow(model: nn.Module) -> None:
    """A buffer of another shape."""
    model.register_buffer("count", torch.ones(3))


@pytest.mark.everywhere
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (add, "lacks 1: 'more'"),
        (drop, "has, but the model lacks, 1: 'count'"),
    ],
)
def test_a_model_of_more_or_fewer_entries_is_refused(
    tmp_path: Path, change: Callable[[nn.Module], None], problem: str
) -> None:
    """By their names."""
    save(tmp_path / "saved")
    directory = repr(str(tmp_path / "saved"))

    refused(
        tmp_path / "saved", MUST_BE_THE_MODELS.format(directory, problem) + BUILD, prepare=change
    )


@pytest.mark.everywhere
def test_a_buffer_of_another_shape_is_refused(tmp_path: Path) -> None:
    """With both shapes."""
    save(tmp_path / "saved")

    refused(
        tmp_path / "saved",
        f"'count' in the checkpoint in {str(tmp_path / 'saved')!r} must have shape (3,), got (1,)"
        f"{BUILD}",
        prepare=grow,
    )


@pytest.mark.everywhere
def test_a_parameter_of_another_shape_is_refused(tmp_path: Path) -> None:
    """A model of four rows does not take the first four of six."""
    save(tmp_path / "saved")

    def body(_rank: int) -> str:
        shard(model := fill(Tied(rows=4)), "")
        with pytest.raises(ConfigError) as caught:
            fsdp_core.load_checkpoint(model, adamw(model), tmp_path / "saved")
        return str(caught.value)

    message = (
        f"'first.weight' in the checkpoint in {str(tmp_path / 'saved')!r} must have shape (4, 2), "
        f"got (6, 2){BUILD}"
    )
    assert on_ranks(body, 2) == [message] * 2


@pytest.mark.everywhere
def test_weights_of_another_dtype_are_refused(tmp_path: Path) -> None:
    """A checkpoint keeps every bit; a full state dict is converted, as by `load_state_dict`."""
    save(tmp_path / "saved")
    half = MixedPrecisionPolicy(main_params_dtype=torch.bfloat16)

    def body(rank: int) -> tuple[str, list[torch.dtype]]:
        model, optimizer = build(mixed_precision_policy=half)
        with pytest.raises(ConfigError) as caught:
            fsdp_core.load_checkpoint(model, optimizer, tmp_path / "saved")
        whole = fill(Tied()).state_dict() if rank == 0 else None
        load_full_state_dict(model, whole)
        return str(caught.value), [each.dtype for each in model.parameters()]

    for message, dtypes in on_ranks(body, 2):
        assert message == (
            f"'first.weight' in the checkpoint in {str(tmp_path / 'saved')!r} must have dtype "
            f"torch.bfloat16, got torch.float32; load it into a model of that dtype "
            f"(main_params_dtype of MixedPrecisionPolicy), whose full_state_dict may be loaded into "
            f"any; nothing was loaded"
        )
        assert set(dtypes) == {torch.bfloat16}


def lose(metadata: Metadata) -> None:
    """Drop an entry."""
    del metadata.state_dict_metadata["model.second.weight"]


def gain(metadata: Metadata) -> None:
    """Have one twice, under another name."""
    entries = metadata.state_dict_metadata
    entries["model.fourth.weight"] = entries["model.second.weight"]


def reshape(metadata: Metadata) -> None:
    """Say that an entry has another shape."""
    entry: Any = metadata.state_dict_metadata["model.second.weight"]
    entry.size = torch.Size((3, 4))


def retype(metadata: Metadata) -> None:
    """Say that an entry has another dtype."""
    entry: Any = metadata.state_dict_metadata["model.second.weight"]
    entry.properties.dtype = torch.float64


def pickle_it(metadata: Metadata) -> None:
    """Say that an entry is no tensor, but a pickle."""
    metadata.state_dict_metadata["model.second.weight"] = BytesStorageMetadata()


@pytest.mark.everywhere
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lose, "got one that lacks 1: 'second.weight'; build"),
        (gain, "got one that has, but the model lacks, 1: 'fourth.weight'; build"),
        (reshape, "must have shape (2, 6), got (3, 4); build"),
        (retype, "must have dtype torch.float32, got torch.float64; load"),
        (pickle_it, "must have shape (2, 6), got None; build"),
    ],
)
def test_entries_that_somebody_edited_are_refused(
    tmp_path: Path, change: Callable[[Metadata], None], problem: str
) -> None:
    """Whatever the checksums say."""
    save(tmp_path / "saved")
    edit_metadata(tmp_path / "saved", change)

    refused(tmp_path / "saved", str(tmp_path / "saved"), problem)
