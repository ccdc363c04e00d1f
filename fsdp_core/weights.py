"""Weights: the full weights of a unit - gathered, put into its modules, and freed again."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter

from torch import Tensor, nn

from fsdp_core import device as accelerator
from fsdp_core.context import FsdpContext
from fsdp_core.device import Event, Stream
from fsdp_core.errors import StateError
from fsdp_core.identity import Identity
from fsdp_core.parameter_group import Member, ParameterGroup, trainability_of
from fsdp_core.torch_private import (
    flat_weights_of,
    in_graph_task,
    shares_storage,
    version_of,
)


@dataclass(frozen=True, slots=True)
class Resharded:
    """The full weights do not exist."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """The full weights were gathered, and no stream was put behind that yet.

    Attributes:
        event: recorded on the all-gather stream behind the gathers; None where events are stubs.
        early: gathered as a prefetch.
    """

    event: Event
    early: bool


@dataclass(frozen=True, slots=True)
class Unsharded:
    """The full weights are readable on a stream.

    Attributes:
        event: as in `Gathered`.
        stream: the one that was put behind it.
    """

    event: Event
    stream: Stream


_RESHARDED = Resharded()
_IS_STALE = attrgetter("is_stale")


class Weights:
    """The full weights of one unit.

    Attributes:
        has_frozen: some parameter gets no gradient.
        is_registered: the modules hold the full parameters, not the sharded ones.
        has_transient: some full weights exist only while they are needed.
        watch: called with the index of a parameter that becomes trainable.
    """

    def __init__(
        self, identity: Identity, groups: Sequence[ParameterGroup], context: FsdpContext
    ) -> None:
        self._identity = identity
        self._groups = groups
        self._context = context
        members = [member for group in groups for member in group.members]
        self._places = [
            (slot.registry, slot.name, member.sharded)
            for member in members
            for slot in member.slots
        ]
        self._slots = [slot for member in members for slot in member.slots]
        self._registries = _by_registry(members)
        self._shardeds = [member.sharded for member in members]
        self._fulls = [member.full for member in members]
        losing = [group for group in groups if not group.keeps_writes]
        self._dropped = [member.full for group in losing for member in group.members]
        self._dropped_fqns = [member.fqn for group in losing for member in group.members]
        self._dropped_versions = list(map(version_of, self._dropped))
        self._transient = [group for group in groups if not group.keeps_full]
        self._transient_nbytes = sum(group.full_nbytes for group in self._transient)
        self._stores = any(group.stores for group in groups)
        self._state: Resharded | Gathered | Unsharded = _RESHARDED
        self._event: Event = None
        self._trainability = trainability_of(self._fulls)
        self.has_frozen = not all(self._trainability)
        self.is_registered = False
        self.has_transient = bool(self._transient)
        self.watch: Callable[[int], None]

    @property
    def is_unsharded(self) -> bool:
        """Whether the full weights exist or are being gathered."""
        return self._state is not _RESHARDED

    @property
    def is_unused(self) -> bool:
        """Whether the full weights were gathered, and no stream was put behind that yet."""
        return isinstance(self._state, Gathered)

    @property
    def is_stale(self) -> bool:
        """Whether the main weights were written since they were last gathered."""
        return any(map(_IS_STALE, self._groups))

    # -- gathering ---------------------------------------------------------------------------

    def prefetch(self) -> None:
        """Gather early, if the weights are not there and backward may use them.

        Ordering:
            Within a forward the all-gather stream is behind the last writes of the weights.
        """
        if self._state is not _RESHARDED or not self._groups:
            return
        if in_graph_task():
            if self.is_stale:
                return
        elif not self._context.calls:
            self.await_writes()
        self._gather(early=True)
        self._context.stats.prefetches += 1

    def await_writes(self) -> None:
        """Put the next gather behind the writes of main weights since the last one, if there were any.

        For what the beginning of a forward does not order: units that are driven by hand, or run again
        in a backward, and weights that are written inside a forward.

        Ordering:
            The writes are on the current stream.
        """
        if self.is_stale:
            # Edge 1: the gather reads what this stream wrote.
            accelerator.wait_stream(self._context.allgather_stream, self._context.current_stream())

    def demand(self) -> None:
        """Have the full weights in the modules, readable on the current stream."""
        if not self._groups:
            return
        stream = self._context.current_stream()
        state = self._state
        if isinstance(state, Resharded):
            self._gather(early=False)
            state = self._state
        if not (isinstance(state, Unsharded) and state.stream == stream):
            assert not isinstance(state, Resharded)
            # Edge 2: compute needs this unit's weights, not what the stream was given later.
            accelerator.wait_event(stream, state.event)
            if isinstance(state, Gathered) and state.early:
                self._context.stats.used_prefetches += 1
            self._state = Unsharded(state.event, stream)
        self._register_full()

    def await_gather(self) -> None:
        """Put the current stream behind a gather that nobody waited for: it reads main weights.

        Ordering:
            Main weights may be written on the current stream from now on.
        """
        state = self._state
        if isinstance(state, Gathered):
            with accelerator.annotate("await_gather", self._identity.label):
                # Edge 2: the gather may still read what is about to be written.
                accelerator.wait_event(self._context.current_stream(), state.event)

    def _gather(self, *, early: bool) -> None:
        """Issue the gathers of all groups.

        Ordering:
            On the all-gather stream, which must be behind the last writes of the main weights.
        """
        context = self._context
        stream = context.allgather_stream
        gathers = 0
        try:
            with accelerator.annotate("unshard", self._identity.label):
                # Full weights belong to the pool of the stream that gathers and frees them.
                with accelerator.on_stream(stream):
                    for group in self._groups:
                        gathers += group.unshard()
                # Nobody waits for the last gather any more: its weights were freed.
                event = self._event = accelerator.record_event(stream, self._event)
        except BaseException:
            # Edge 2: what was begun has no event yet, and reads main weights.
            accelerator.wait_stream(context.current_stream(), stream)
            self._release()
            raise
        self._state = Gathered(event, early)
        context.stats.gathers += gathers
        if gathers and not early:
            context.stats.on_demand_gathers += 1
        context.note_unsharded(self._identity.ref, self._transient_nbytes)

    # -- in the modules ----------------------------------------------------------------------

    def _register_full(self) -> None:
        if self.is_registered:
            self._follow_full()
            return
        for registry, name, sharded in self._places:
            if registry.get(name) is not sharded:
                raise self._replaced(registry, name)
        if trainability_of(self._shardeds) != self._trainability:
            self._follow_trainability()
        for registry, fulls, _ in self._registries:
            registry.update(fulls)
        self.is_registered = True

    def _replaced(self, registry: dict[str, nn.Parameter | None], name: str) -> StateError:
        """Say that somebody put another object where a module holds a sharded parameter."""
        fqn = next(
            slot.fqn for slot in self._slots if slot.registry is registry and slot.name == name
        )
        msg = (
            f"the parameters of unit {self._identity.name!r} must be those that fully_shard put "
            f"there, got another object for {fqn!r} (by assignment, or torch.func.functional_call); "
            f"copy values into the sharded parameter, under torch.no_grad()"
        )
        return self._context.located(StateError(msg, fqn=self._identity.fqn))

    def _register_sharded(self) -> None:
        if not self.is_registered:
            return
        for registry, _, shardeds in self._registries:
            registry.update(shardeds)
        self._follow_full()
        self.is_registered = False

    def _follow_full(self) -> None:
        """Freeze or unfreeze sharded parameters as their full ones were, while these were in the modules."""
        if trainability_of(self._fulls) != self._trainability:
            for sharded, full in zip(self._shardeds, self._fulls, strict=True):
                sharded.requires_grad_(full.requires_grad)
            self._note_trainability()

    def _follow_trainability(self) -> None:
        """Freeze or unfreeze full parameters as their sharded ones were."""
        for sharded, full in zip(self._shardeds, self._fulls, strict=True):
            if full.requires_grad != sharded.requires_grad:
                full.requires_grad_(sharded.requires_grad)
        self._note_trainability()

    def _note_trainability(self) -> None:
        """Take in what is trained now, sharded and full alike."""
        before, self._trainability = self._trainability, trainability_of(self._fulls)
        self.has_frozen = not all(self._trainability)
        self._context.trainability_changes += 1
        for index, (was, is_now) in enumerate(zip(before, self._trainability, strict=True)):
            if is_now and not was:
                self.watch(index)
        reduced = [group for group in self._groups if group.is_trainable]
        members = [member for group in reduced for member in group.members]
        self._identity.leave_out([each.fqn for each in members if not each.full.requires_grad])

    def check_unwritten(self) -> None:
        """Check that nobody wrote full weights that are dropped.

        Raises:
            StateError: somebody did.
        """
        versions = list(map(version_of, self._dropped))
        if versions == self._dropped_versions:
            return
        each = zip(self._dropped_fqns, self._dropped_versions, versions, strict=True)
        written = [fqn for fqn, before, now in each if now != before]
        self._dropped_versions = versions
        msg = (
            f"full weights must not be written, got a write of {written} of unit "
            f"{self._identity.name!r}, which is lost when they are freed; write the sharded parameters "
            f"between passes, under torch.no_grad()"
        )
        raise self._context.located(StateError(msg, fqn=self._identity.fqn))

    def over_freed(self, tensor: Tensor) -> str | None:
        """Return which parameter's freed memory a tensor is over; None if it is over none."""
        if self._state is not _RESHARDED:
            return None
        for group in self._transient:
            if shares_storage(tensor, group.full_weight.flat):
                begun = [
                    member
                    for member in group.members
                    if member.full.storage_offset() <= tensor.storage_offset()
                ]
                last = max(begun, key=lambda member: member.full.storage_offset())
                return self._identity.full_name(last.fqn)
        return None

    @contextmanager
    def hidden(self, fn: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Take the parameters out of the modules while `nn.Module._apply` goes through these.

        Why: it replaces each parameter's contents, which would part it from the buffers.

        Raises:
            StateError: `fn` changes device or dtype.
        """
        for group in self._groups:
            before = group.main_weight.flat[:0]
            after = fn(before)
            if (after.dtype, after.device) != (before.dtype, before.device):
                msg = (
                    f"sharded parameters keep their device and dtype, got a conversion of unit "
                    f"{self._identity.name!r} from {before.dtype} on {before.device} to {after.dtype} "
                    f"on {after.device}; convert before fully_shard, or use MixedPrecisionPolicy"
                )
                raise self._context.located(StateError(msg, fqn=self._identity.fqn))
        held = [(registry, name, registry[name]) for registry, name, _ in self._places]
        flat = [(owner, flat_weights_of(owner)) for owner in self._owners()]
        for registry, name, _ in held:
            registry[name] = None
        try:
            yield
        finally:
            for registry, name, parameter in held:
                registry[name] = parameter
            for owner, weights in flat:
                vars(owner).update(weights)

    def _owners(self) -> list[nn.Module]:
        """Return the modules that hold the unit's parameters, each once."""
        owners = [slot.owner() for slot in self._slots]
        return list(dict.fromkeys(owner for owner in owners if owner is not None))

    # -- freeing -----------------------------------------------------------------------------

    def drop_stale(self) -> None:
        """Give weights up that were gathered before the main weights were last written."""
        if self._state is not _RESHARDED and self.is_stale:
            self.reshard()
            self.await_writes()

    def reshard(self) -> None:
        """Put the sharded parameters back and free the full weights."""
        self._register_sharded()
        self.free()

    def free(self) -> None:
        """Free the full weights; the modules keep what they hold."""
        state = self._state
        if isinstance(state, Resharded):
            return
        context = self._context
        if isinstance(state, Gathered) and self._stores:
            # Edge 2: what was gathered stays, for uses that will not ask again.
            accelerator.wait_event(context.current_stream(), state.event)
        if self._transient:
            with accelerator.annotate("reshard", self._identity.label):
                if isinstance(state, Unsharded):
                    # Edge 3: the memory may be reused at once, so its readers must be done.
                    accelerator.wait_stream(context.allgather_stream, context.current_stream())
                elif not self._stores:
                    # Edge 2: the gather has read the main weights, which may be written next.
                    accelerator.wait_event(context.current_stream(), state.event)
                self._release()
            context.stats.unused_prefetches += isinstance(state, Gathered) and state.early
        self._state = _RESHARDED
        context.note_resharded(self._identity.ref, self._transient_nbytes)

    def _release(self) -> None:
        """Give the full weights back to the pool that they came from, whatever stream is current."""
        for group in self._transient:
            group.reshard()


Registry = dict[str, nn.Parameter | None]
Named = dict[str, nn.Parameter]


def _by_registry(members: Sequence[Member]) -> list[tuple[Registry, Named, Named]]:
    """Return modules' dicts of parameters, each with the full and the sharded ones that go into it."""
    found: list[tuple[Registry, Named, Named]] = []
    for member in members:
        for slot in member.slots:
            if not found or found[-1][0] is not slot.registry:
                found.append((slot.registry, {}, {}))
            _, fulls, shardeds = found[-1]
            fulls[slot.name], shardeds[slot.name] = member.full, member.sharded
    return found
