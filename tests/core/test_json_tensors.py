"""JSON in tensors of bytes: what goes in comes out, and nothing else is taken for it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_core import ConfigError
from fsdp_core.errors import UnsupportedError
from fsdp_core.json_tensors import decode, encode

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES)
@settings(max_examples=30)
def test_a_value_comes_back(value: object) -> None:
    """Numbers with all their bits, texts of any language."""
    tensor = encode("options", value)

    assert (tensor.dtype, tensor.dim()) == (torch.uint8, 1)
    assert decode("options", tensor) == value


@pytest.mark.parametrize("value", [{1, 2}, torch.float32, b"bytes"])
def test_what_json_cannot_say_is_refused(value: object) -> None:
    """By its name, with the value."""
    with pytest.raises(UnsupportedError) as caught:
        encode("optimizer.options", {"extra": value})

    assert str(caught.value) == (
        f"'optimizer.options' must be a tensor or what JSON can say, got { ({'extra': value})!r}; turn it "
        f"into one of these, or leave it out"
    )
    assert caught.value.fqn == "optimizer.options"


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"1 2", "Extra data: line 1 column 3 (char 2)"),
        (b"", "Expecting value: line 1 column 1 (char 0)"),
        (b"\xff1", "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
    ],
)
def test_bytes_that_are_no_json_are_refused(data: bytes, problem: str) -> None:
    """By their name, with what Python says of them."""
    with pytest.raises(ConfigError) as caught:
        decode("optimizer.options", torch.tensor(list(data), dtype=torch.uint8))

    assert str(caught.value) == (
        f"'optimizer.options' of a checkpoint must be JSON, got {problem}; load another one; nothing "
        f"was loaded"
    )
