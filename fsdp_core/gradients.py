"""Gradients: those of a unit - counted as they come, reduced, and shown to the optimizer."""

from collections.abc import Sequence

import torch

from fsdp_core import device as accelerator
from fsdp_core.context import FsdpContext
from fsdp_core.errors import StateError, StateValueError
from fsdp_core.identity import Identity
from fsdp_core.parameter_group import ParameterGroup, have_gradients, trainable_among
from fsdp_core.torch_private import (
    any_post_accumulate_hooks,
    in_graph_task,
    post_accumulate_hooks,
)
from fsdp_core.window import Window


class Gradients:
    """The gradients of one unit.

    Attributes:
        window: what has come of those that complete the unit.
        has_delayed: some come after autograd's, by a call of their own module.
    """

    def __init__(
        self,
        identity: Identity,
        groups: Sequence[ParameterGroup],
        context: FsdpContext,
        declared: int | None,
    ) -> None:
        self._identity = identity
        self._groups = groups
        self._context = context
        self._declared = declared
        self._members = [member for group in groups for member in group.members]
        self._fulls = [member.full for member in self._members]
        self._shardeds = [member.sharded for member in self._members]
        self.has_delayed = any(member.is_delayed for member in self._members)
        self.window = self._new_window()
        # The backward pass that brought the last gradient of a declared window.
        self._filled_in = -1

    # -- counting ----------------------------------------------------------------------------

    def _new_window(self) -> Window:
        fired = bytearray(len(self._members))
        if self._declared is not None:
            return Window(fired, self._declared, declared=True)
        return Window(fired, trainable_among(self._fulls), declared=False)

    def open_window(self) -> None:
        """Begin a window, unless one is half full."""
        if not self.window.count:
            self.window = self._new_window()

    def close_window(self) -> None:
        """End a backward of the unit; a window whose declared gradients have not all come stays."""
        if self.window.declared and self.window.is_full and in_graph_task():
            self._filled_in = self._context.graph_task
        if self.window.is_full or not self.window.declared:
            self.window = self._new_window()
        else:
            self.window.entered, self.window.nested = 0, False

    def check_declared(self, index: int) -> None:
        """Check that one more gradient of a parameter was declared.

        Raises:
            StateError: more came in one backward pass than were declared.
        """
        window = self.window
        if window.is_full or self._is_filled_in_this_pass:
            fqn = self._members[index].fqn
            msg = (
                f"grad_accumulation_count of unit {self._identity.name!r} must count every gradient "
                f"of a window, got {window.expected} declared and one more for {fqn!r} in the same "
                f"backward pass; declare as many as come, or None"
            )
            name = self._identity.full_name(fqn)
            raise self._context.located(StateValueError(msg, fqn=name))

    @property
    def may_get_more(self) -> bool:
        """Whether gradients may come that were not declared."""
        return self.window.declared and bool(self._missing())

    @property
    def _is_filled_in_this_pass(self) -> bool:
        return self._filled_in == self._context.graph_task and in_graph_task()

    def expect_delayed_alone(self) -> None:
        """Wait for delayed gradients alone: no others that are missing will come."""
        window = self.window
        if self.has_delayed and not window.declared:
            missing = sum(
                member.is_delayed and member.full.requires_grad and not fired
                for member, fired in zip(self._members, window.fired, strict=True)
            )
            window.expected = window.count + missing

    @property
    def are_full(self) -> bool:
        """Whether gradients of full parameters wait to be reduced."""
        return have_gradients(self._fulls)

    # -- reduction ---------------------------------------------------------------------------

    def reduce(self) -> None:
        """Reduce the gradients that have come; missing ones count as zeros."""
        context = self._context
        context.validate_grad_sync(self._identity)
        self.window.reduced = True
        groups = [group for group in self._groups if group.is_trainable]
        if not groups:
            return
        current, inner = context.current_stream(), context.inner_reduction_stream
        with accelerator.annotate("reduce_gradients", self._identity.label), torch.no_grad():
            # Partial gradients belong to the pool of the stream that reduces and frees them.
            with accelerator.on_stream(inner):
                for group in groups:
                    group.allocate_gradients()
            # Edge 5: that memory may still be read by an earlier reduction.
            accelerator.wait_stream(current, inner)
            self._adopt(groups)
            for group in groups:
                group.copy_in()
            # Edge 6: the reduction reads what was copied.
            accelerator.wait_stream(inner, current)
            outer = context.outer_reduction_stream
            if outer is not inner and any(g.finished_in == context.stats.steps for g in groups):
                # Edge 9, backwards: it adds to what was finished earlier in this pass.
                accelerator.wait_stream(inner, outer)
            # Reductions run beside the backward of the units in front.
            with accelerator.on_stream(inner):
                for group in groups:
                    group.reduce()
            if context.is_last_microbatch:
                self._finish(groups)
            else:
                for group in groups:
                    group.bind(is_over=False)
                context.note_unfinished(self._identity.ref)
        context.stats.reductions += len(groups)
        context.note_reduced(self._identity.ref)

    def finish_window(self) -> None:
        """Bring gradients into optimizer placements: the last microbatch is over."""
        groups = [group for group in self._groups if group.awaits_finish]
        with accelerator.annotate("reduce_gradients", self._identity.label), torch.no_grad():
            if any(group.foreign_gradients() for group in groups):
                current, inner = (
                    self._context.current_stream(),
                    self._context.inner_reduction_stream,
                )
                # Edge 7: somebody replaced what this stream wrote.
                accelerator.wait_stream(current, inner)
                self._adopt(groups)
                # Edge 6: the reduction reads what was copied.
                accelerator.wait_stream(inner, current)
            self._finish(groups)

    def _adopt(self, groups: Sequence[ParameterGroup]) -> None:
        """Add to what users made of gradients, not to what these were.

        Ordering:
            Runs on the current stream, which must be behind the inner reductions.

        Raises:
            StateError: a gradient has other rows than the one that it replaces.
        """
        context = self._context
        for group in groups:
            foreign = group.foreign_gradients()
            if foreign:
                # Edge 7: the outer reduction may have written what they take the place of.
                accelerator.wait_stream(context.current_stream(), context.outer_reduction_stream)
            for index in foreign:
                if not group.adopt_gradient(index):
                    fqn = group.members[index].fqn
                    msg = (
                        f"a gradient must have the rows of the one that it replaces, got other ones "
                        f"for {fqn!r} of unit {self._identity.name!r}; compute it from that one"
                    )
                    raise context.located(StateError(msg, fqn=self._identity.full_name(fqn)))

    def _finish(self, groups: Sequence[ParameterGroup]) -> None:
        apart = [group for group in groups if group.finishes_apart]
        if apart:
            self._finish_apart(apart)
        for group in groups:
            group.bind(is_over=True)

    def _finish_apart(self, groups: Sequence[ParameterGroup]) -> None:
        """Run the reductions that end a window, which may have a stream of their own."""
        context = self._context
        outer = context.outer_reduction_stream
        if outer is not context.inner_reduction_stream:
            # Edge 9: the outer reduction reads the result of the inner one.
            accelerator.wait_stream(outer, context.inner_reduction_stream)
        with accelerator.on_stream(outer):
            for group in groups:
                group.finish_window()
                if outer is not context.inner_reduction_stream:
                    group.finished_in = context.stats.steps

    # -- at rest -----------------------------------------------------------------------------

    def release(self) -> None:
        """Give the memory of dropped gradients back; see `ParameterGroup.release_gradients`."""
        for group in self._groups:
            group.release_gradients()

    def drop(self) -> None:
        """Forget every gradient, and what came of the window."""
        self.window = self._new_window()
        for group in self._groups:
            group.drop_gradients()

    def check_complete(self, *, is_open: bool) -> None:
        """Check that all gradients of the window have come.

        Args:
            is_open: the unit's backward is not over.

        Raises:
            StateError: some are still to come.
        """
        problem = self._incompleteness(is_open=is_open)
        if problem is not None:
            raise self._context.located(problem)

    def _incompleteness(self, *, is_open: bool) -> StateError | None:
        """Say what is still to come, and how it comes."""
        window, name, fqn = self.window, self._identity.name, self._identity.fqn
        if window.declared and 0 < window.count < window.expected:
            trainable = [member.fqn for member in self._members if member.full.requires_grad]
            missing = self._missing()
            whose = f", none yet for {missing}" if missing else f" of {trainable}"
            msg = (
                f"a window of gradients must be whole when it is used, got unit {name!r} "
                f"mid-flight with {window.count}/{window.expected} gradients{whose}; run the "
                f"backwards that are missing, or declare another grad_accumulation_count"
            )
            return StateValueError(msg, fqn=fqn)
        if any(group.awaits_finish for group in self._groups):
            msg = (
                f"the gradients of unit {name!r} must be complete when they are used, got none "
                f"from a last microbatch; run that backward inside microbatch(context, is_last=True)"
            )
            return StateError(msg, fqn=fqn)
        if is_open:
            msg = (
                f"all gradients of unit {name!r} must have come before they are used, got "
                f"none yet for {self._missing()}; finish its backward first"
            )
            return StateError(msg, fqn=fqn)
        if self.are_full:
            held = [member.fqn for member in self._members if member.full.grad is not None]
            msg = (
                f"the gradients of unit {name!r} must be reduced before they are used, got "
                f"unreduced ones for {held}; end a backward that is driven by hand with "
                f"context.post_backward()"
            )
            return StateError(msg, fqn=fqn)
        return None

    def _missing(self) -> list[str]:
        """Return the trainable parameters that have got no gradient in this window yet."""
        return [
            member.fqn
            for index, member in enumerate(self._members)
            if member.full.requires_grad and not self.window.fired[index]
        ]

    @property
    def have_hooks(self) -> bool:
        """Whether users hooked the sharded gradients."""
        return any_post_accumulate_hooks(self._shardeds)

    def run_hooks(self) -> None:
        """Call what users registered on the sharded parameters, on their reduced gradients.

        Ordering:
            Requires that the current stream is behind the reductions.
        """
        for sharded in self._shardeds:
            if sharded.grad is not None:
                for hook in post_accumulate_hooks(sharded):
                    hook(sharded)

    def parameters_without_grad(self) -> list[str]:
        """Return the names of trainable parameters without a sharded gradient."""
        return [
            self._identity.full_name(member.fqn)
            for member in self._members
            if member.sharded.requires_grad and member.sharded.grad is None
        ]
