"""Window: the one countdown of the gradients that complete a unit (pure)."""

from dataclasses import dataclass


@dataclass(slots=True)
class Window:
    """What a unit has got of the gradients that complete it.

    Attributes:
        fired: for each parameter, whether a gradient came.
        expected: gradients that complete the window.
        declared: `expected` was declared, and counts every gradient; otherwise each trainable
            parameter counts once, however often it is used.
        count: how many came.
        entered: uses that backward has entered.
        graph_task: the backward pass that entered the last one.
        nested: some gradients come in a backward pass inside the one that entered the unit
            (reentrant checkpointing), so more may come until that one moves on.
        reduced: the gradients were reduced; frozen weights may still be needed.
    """

    fired: bytearray
    expected: int
    declared: bool
    count: int = 0
    entered: int = 0
    graph_task: int = -1
    nested: bool = False
    reduced: bool = False

    @property
    def is_full(self) -> bool:
        """Whether all expected gradients have come."""
        return self.count >= self.expected

    @property
    def is_due(self) -> bool:
        """Whether all expected gradients have come, at least one at all, and none is reduced yet."""
        return self.is_full and not self.nested and not self.reduced and any(self.fired)

    def enter(self, graph_task: int, *, nested: bool) -> None:
        """Note that a backward pass has entered one more use."""
        self.entered += 1
        self.graph_task = graph_task
        self.nested |= nested

    def add(self, index: int) -> bool:
        """Count one gradient, and return whether all expected ones have come."""
        if self.declared or not self.fired[index]:
            self.count += 1
        self.fired[index] = 1
        return self.count >= self.expected
