"""Errors: each is also the built-in error that a caller would catch."""

import pickle

import pytest

from fsdp_core.errors import (
    ConfigError,
    ConfigTypeError,
    StateError,
    StateValueError,
    UnsupportedError,
)


@pytest.mark.parametrize(
    ("error", "families"),
    [
        (ConfigError, (ValueError,)),
        (ConfigTypeError, (ConfigError, TypeError)),
        (UnsupportedError, (ConfigError, NotImplementedError)),
        (StateError, (RuntimeError,)),
        (StateValueError, (StateError, ValueError)),
    ],
)
def test_an_error_belongs_to_the_built_in_families(
    error: type[Exception], families: tuple[type[Exception], ...]
) -> None:
    """Code that catches the built-in type catches ours."""
    assert all(issubclass(error, family) for family in families)


@pytest.mark.parametrize("error", [ConfigError, StateError])
def test_an_error_carries_the_name_it_is_about(error: type[ConfigError | StateError]) -> None:
    """Also through a pickle, as it comes from a worker process."""
    copy = pickle.loads(pickle.dumps(error("must be so", fqn="layers.0.weight")))

    assert (str(copy), copy.fqn) == ("must be so", "layers.0.weight")
