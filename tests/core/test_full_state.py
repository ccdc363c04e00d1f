"""Whole models: out of shards and into them, on rank 0 alone, and as safetensors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_core import ConfigError
from fsdp_core.errors import UnsupportedError
from fsdp_core.full_state import export_safetensors, full_state_dict, load_full_state_dict
from tests.cases.programs import assert_equal, fill, local_rows
from tests.core.saved_models import Tied, build, counting
from tests.core.worlds import on_ranks


@pytest.mark.everywhere
def test_a_full_state_dict_goes_out_and_in(tmp_path: Path) -> None:
    """Rank 0 alone holds it, on the CPU; loading it elsewhere gives the same model."""

    def out(_rank: int) -> dict[str, Tensor]:
        model, _ = build()
        return full_state_dict(model)

    def back(rank: int) -> dict[str, Tensor]:
        model, _ = build(units=(("first", "third", "second"),), mesh=(3,))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(9.0)
        load_full_state_dict(model, whole if rank == 0 else None)
        return full_state_dict(model)

    whole, empty = on_ranks(out, 2)
    again = on_ranks(back, 3)[0]

    expected = dict(fill(Tied()).state_dict())
    assert empty == {}
    assert_equal(dict(whole), expected)
    assert_equal(dict(again), expected)


@pytest.mark.everywhere
def test_a_full_state_dict_with_other_entries_is_refused_on_every_rank() -> None:
    """Ranks that hold nothing raise what rank 0 found."""

    def body(rank: int) -> str:
        model, _ = build()
        wrong = {"first.weight": torch.ones(5, 2)} if rank == 0 else None
        with pytest.raises(ConfigError) as caught:
            load_full_state_dict(model, wrong)
        return str(caught.value)

    messages = on_ranks(body, 2)

    assert messages[0] == messages[1]
    assert "got none for 'count', 'first.bias', 'second.weight', 'second.bias'" in messages[0]


@pytest.mark.everywhere
@pytest.mark.parametrize(
    ("entry", "got"),
    [
        (3, "int for 'second.bias' instead of a whole tensor"),
        (None, "NoneType for 'second.bias' instead of a whole tensor"),
        (DTensor, "DTensor for 'second.bias' instead of a whole tensor"),
        (
            torch.empty(2, device="meta"),
            "layout torch.strided on meta for 'second.bias' instead of",
        ),
        (torch.ones(2).to_sparse(), "layout torch.sparse_coo on cpu for 'second.bias' instead of"),
    ],
    ids=["a number", "None", "sharded", "meta", "sparse"],
)
def test_a_full_state_dict_of_anything_but_whole_tensors_is_refused_on_every_rank(
    entry: Any, got: str
) -> None:
    """Before the first entry is sent."""

    def body(rank: int) -> str:
        model, _ = build()
        before = local_rows(model)
        sharded = model.state_dict()["second.bias"]
        wrong = {**Tied().state_dict(), "second.bias": sharded if entry is DTensor else entry}
        with pytest.raises(ConfigError) as caught:
            load_full_state_dict(model, wrong if rank == 0 else None)
        assert_equal(local_rows(model), before)
        return str(caught.value)

    messages = on_ranks(body, 2)

    assert messages[0] == messages[1]
    assert f", got {got}" in messages[0]


@pytest.mark.everywhere
def test_a_model_is_exported_as_safetensors(tmp_path: Path) -> None:
    """One file with every name, tied ones too."""

    def body(_rank: int) -> None:
        model, _ = build()
        export_safetensors(model, tmp_path / "model.safetensors")

    on_ranks(body, 2)

    expected = dict(fill(Tied()).state_dict())
    got = load_file(tmp_path / "model.safetensors")
    assert_equal({name: got[name] for name in expected}, expected)
    assert sorted(got) == sorted(expected)


@pytest.mark.everywhere
def test_a_file_that_rank_0_cannot_write_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    """The others have the error of rank 0."""

    def body(_rank: int) -> str:
        model, _ = build()
        with pytest.raises(Exception, match="nowhere") as caught:
            export_safetensors(model, tmp_path / "nowhere" / "model.safetensors")
        return str(caught.value)

    messages = on_ranks(body, 2)

    assert messages[1] == f"SafetensorError: {messages[0]}"


@pytest.mark.everywhere
def test_a_state_that_is_no_tensor_is_not_exported_as_safetensors(tmp_path: Path) -> None:
    """The error names it, on every rank."""

    def body(_rank: int) -> str:
        model, _ = counting()
        with pytest.raises(UnsupportedError) as caught:
            export_safetensors(model, tmp_path / "model.safetensors")
        return str(caught.value)

    message = (
        "a safetensors file holds tensors alone, got a dict for '_extra_state'; use full_state_dict, "
        "or give the module a state of tensors"
    )
    assert on_ranks(body, 2) == [message] * 2
