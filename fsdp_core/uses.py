"""Use, Uses, LiveGraphs: which forward calls backward has still to enter."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fsdp_core.torch_private import has_reentrant_checkpoint, next_node_number
from fsdp_core.unit_protocol import Call


@dataclass(slots=True, weakref_slot=True, eq=False)
class Use:
    """One forward call whose outputs are part of an autograd graph.

    Attributes:
        module: the unit's module that was called, weakly: the graph must not keep a model alive.
        enclosing: the units whose forward this call was made in.
        first_node: number that the first autograd node of the call got.
        calls: how many calls of units were made in it, itself among them.
        is_recomputed: the call was made inside a backward pass.
        graph_task: the backward pass that has entered it last.
        recomputes: part of it is recomputed in a backward pass of its own (reentrant
            checkpointing), whose gradients come apart from the others.
    """

    module: "weakref.ref[nn.Module]"
    enclosing: tuple["weakref.ref[Any]", ...]
    first_node: int
    calls: int
    is_recomputed: bool
    graph_task: int = -1
    recomputes: bool = False


class Uses:
    """The calls of one unit that have a graph, as far as their graphs live, and those that may get one."""

    def __init__(self) -> None:
        self._callers: dict[weakref.ref[Any], None] = {}
        self._uses: list[weakref.ref[Use]] = []
        self._hidden = 0
        self._recomputes: dict[tuple[int, int], bool] = {}
        self._trainability_changes = 0

    def note_callers(self, calls: Sequence[Call]) -> None:
        """Note in which calls of other units this unit is called."""
        for call in calls:
            self._callers[call.unit.ref] = None

    def use_of(self, call: Call, calls: Sequence[Call], calls_begun: int) -> Use:
        """Return what backward enters through the outputs of a call that has ended.

        Args:
            call: of the unit.
            calls: those that it was made in, outermost first.
            calls_begun: how many there were so far.
        """
        enclosing, made = self._enclosing_of(call, calls), calls_begun - call.number
        return Use(weakref.ref(call.module), enclosing, call.first_node, made, call.recomputing)

    def _enclosing_of(self, call: Call, calls: Sequence[Call]) -> tuple["weakref.ref[Any]", ...]:
        """Return the units that backward must not have left when it enters this call.

        A recomputed call does not see the forward that it was first made in, so it counts every
        unit that ever called this one.
        """
        if call.recomputing:
            return tuple(self._callers)
        return tuple(each.unit.ref for each in calls if each.unit is not call.unit)

    def add(self, use: Use, outputs: Sequence[Tensor], trainability_changes: int) -> None:
        """Note which outputs of a call backward can enter.

        Why the counts of nodes and of calls: they tell forwards that took other ways apart, so that a
        graph is looked at once for each way, as long as the same parameters are trained.
        """
        if trainability_changes != self._trainability_changes:
            self._trainability_changes = trainability_changes
            self._recomputes.clear()
        way = next_node_number() - use.first_node, use.calls
        if outputs:
            self._uses.append(weakref.ref(use))
            if way not in self._recomputes:
                self._recomputes[way] = has_reentrant_checkpoint(outputs, use.first_node)
        use.recomputes = self._recomputes.get(way, False)

    def enter(self, use: Use) -> None:
        """Take a call from those that are still to come."""
        reference = weakref.ref(use)
        if reference in self._uses:
            self._uses.remove(reference)
        if use.is_recomputed:
            self._hidden = max(0, self._hidden - 1)

    def outstanding(self) -> int:
        """Return how many calls backward has still to enter, as far as their graphs live."""
        self._uses = [ref for ref in self._uses if ref() is not None]
        return len(self._uses) + self._hidden

    def hide(self) -> None:
        """Count a call without a graph in a forward with one: it may be recomputed with one."""
        self._hidden += 1

    def forget_hidden(self) -> None:
        """Note that no graph is left that could recompute a call."""
        self._hidden = 0

    def clear(self) -> None:
        """Forget every call."""
        self._uses.clear()
        self._hidden = 0


class LiveGraphs:
    """The outermost forwards of a context whose graphs no backward pass has entered yet.

    Attributes:
        count: forwards so far that gave a graph.
    """

    def __init__(self) -> None:
        self.count = 0
        self._graphs: list[weakref.ref[Use]] = []
        self._hidden: dict[weakref.ref[Uses], None] = {}

    def note(self, use: Use) -> None:
        """Note that an outermost forward gave something that backward can enter."""
        self.count += 1
        self._graphs.append(weakref.ref(use))

    def note_hidden(self, uses: Uses) -> None:
        """Note that a unit was called where a graph's backward may call it again."""
        self._hidden[weakref.ref(uses)] = None

    def forget_hidden(self) -> None:
        """Let go of calls that no graph can recompute any more."""
        self._graphs = [ref for ref in self._graphs if _is_unentered(ref())]
        if not self._graphs:
            for ref in self._hidden:
                uses = ref()
                if uses is not None:
                    uses.forget_hidden()
            self._hidden.clear()


def _is_unentered(use: Use | None) -> bool:
    """Whether a call's graph lives and no backward pass has entered it yet."""
    return use is not None and use.graph_task == -1
