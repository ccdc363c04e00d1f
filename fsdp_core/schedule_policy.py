"""SchedulePolicy: how one unit is scheduled: prefetch budgets, hooks, expected gradients."""

from dataclasses import InitVar, dataclass

from fsdp_core.errors import ConfigError, ConfigTypeError, UnsupportedError


@dataclass(frozen=True)
class SchedulePolicy:
    """How one unit is scheduled.

    Attributes:
        forward_prefetch_size: budget of the gathers issued early while this unit runs forward, in
            elements. None: exactly one unit ahead. 0: none. The last one may overshoot.
        backward_prefetch_size: the same in backward.
        register_hooks: False: the caller drives the unit with `unshard`, `reshard` and
            `register_post_backward_hook`; only the guard of `load_state_dict` is installed.
        grad_accumulation_count: gradients that complete one reduction window of the whole unit.
            None: one for each owned trainable parameter.
        reshard_after_forward: False: the full weights stay until the unit's backward is over.
        unshard_all_planes_in_backward: accepted to be refused: it concerns MXFP8 alone.
    """

    forward_prefetch_size: int | None = None
    backward_prefetch_size: int | None = None
    register_hooks: bool = True
    grad_accumulation_count: int | None = None
    reshard_after_forward: bool = True
    unshard_all_planes_in_backward: InitVar[bool] = False

    def __post_init__(self, unshard_all_planes_in_backward: bool) -> None:
        """Check every field.

        Raises:
            ConfigTypeError: a budget or count is not an int, or a switch not a bool.
            ConfigError: a budget or count is negative.
            UnsupportedError: `unshard_all_planes_in_backward` is asked for.
        """
        for name in ("forward_prefetch_size", "backward_prefetch_size", "grad_accumulation_count"):
            _check_count(name, getattr(self, name))
        for name in ("register_hooks", "reshard_after_forward"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                msg = f"SchedulePolicy.{name} must be a bool, got {value!r}; pass True or False"
                raise ConfigTypeError(msg)
        if unshard_all_planes_in_backward:
            msg = (
                f"SchedulePolicy.unshard_all_planes_in_backward needs MXFP8 weights, which are not "
                f"built, got {unshard_all_planes_in_backward!r}; leave it out"
            )
            raise UnsupportedError(msg)


def _check_count(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        msg = f"SchedulePolicy.{name} must be None or an int, got {value!r}; pass None for the default"
        raise ConfigTypeError(msg)
    if value < 0:
        msg = f"SchedulePolicy.{name} must not be negative, got {value}; pass 0 for none"
        raise ConfigError(msg)
