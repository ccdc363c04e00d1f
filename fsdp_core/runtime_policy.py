"""RuntimePolicy: the switches of a whole context, fixed at its construction."""

from dataclasses import dataclass, fields

from fsdp_core.errors import ConfigTypeError


@dataclass(frozen=True)
class RuntimePolicy:
    """How a context uses its streams.

    Attributes:
        use_symmetric_memory: take the staging buffers of collectives from PyTorch's pool of
            symmetric memory. Not built: a context refuses True.
        overlap_allgather_reduction: all-gathers and reductions have a stream each. False: one
            stream for both, which overlaps less; what one has freed, the other may use. Either
            way a backward has at most three buffers as large as a unit's full weights at a time.
        overlap_outer_communication: the outer-axis reduction of the last microbatch has a stream
            of its own (hybrid sharding).
        caller_managed_grad_sync: the caller, not the end of backward, orders the current stream
            after the reductions, with `FsdpContext.finish_grad_sync`. Weights are still cleaned
            up automatically.
    """

    use_symmetric_memory: bool = False
    overlap_allgather_reduction: bool = True
    overlap_outer_communication: bool = False
    caller_managed_grad_sync: bool = False

    def __post_init__(self) -> None:
        """Check the types: a string or a number here is a mistake, not a truth value.

        Raises:
            ConfigTypeError: a field is not a bool.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, bool):
                msg = (
                    f"RuntimePolicy.{field.name} must be a bool, got {value!r}; pass True or False"
                )
                raise ConfigTypeError(msg)
