"""The two errors of fsdp_core: a configuration that cannot work, and a call at the wrong time."""


class ConfigError(ValueError):
    """A model, mesh, policy or argument that cannot be sharded as asked.

    Raised before anything is changed. The usual causes: placements of the wrong length or kind,
    a parameter that cannot be split by rows, an option that is not built.

    Attributes:
        fqn: name of the parameter or module concerned, relative to its unit's root; None if the
            error concerns none in particular.
    """

    def __init__(self, message: str, *, fqn: str | None = None) -> None:
        super().__init__(message)
        self.fqn = fqn


class ConfigTypeError(ConfigError, TypeError):
    """A `ConfigError` whose cause is an argument of the wrong type."""


def check_type(name: str, value: object, kind: type) -> None:
    """Check that an argument is of the type that it must be.

    Raises:
        ConfigTypeError: it is not; names the argument.
    """
    if not isinstance(value, kind):
        msg = f"{name} must be a {kind.__name__}, got {value!r}; pass one of that type"
        raise ConfigTypeError(msg)


class UnsupportedError(ConfigError, NotImplementedError):
    """A `ConfigError` whose cause is something that makes sense and is not built."""


class StateError(RuntimeError):
    """A call that is right in itself, but not now.

    The usual causes: a forward inside the construction scope, a unit entered twice, a pass that
    differs from the recorded one, a backward that raised and was not reset.

    Attributes:
        fqn: name of the parameter or module concerned; None if the error concerns none.
    """

    def __init__(self, message: str, *, fqn: str | None = None) -> None:
        super().__init__(message)
        self.fqn = fqn


class StateValueError(StateError, ValueError):
    """A `StateError` about a count that is not what it must be at this point."""
