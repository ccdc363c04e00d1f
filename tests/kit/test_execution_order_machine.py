"""ExecutionOrder against a list and a number."""

import gc

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from torch import nn

from fsdp_core import ExecutionEvent, ExecutionOrder, Phase

PHASES = st.sampled_from((Phase.FORWARD, Phase.BACKWARD))


class OrderMachine(RuleBasedStateMachine):
    """Appends, consumes, peeks, truncates, moves, and deletes modules, in any order.

    The model is the list of (module's number, phase), the cursor, and the set of modules alive.
    """

    modules = Bundle("modules")

    def __init__(self) -> None:
        super().__init__()
        self.order = ExecutionOrder()
        self.expected: list[tuple[int, Phase]] = []
        self.position = 0
        self.alive: dict[int, nn.Module] = {}

    @initialize()
    def start_empty(self) -> None:
        """An order without events has nothing to peek at."""
        assert self.order.peek() is None

    @rule(target=modules)
    def make_module(self) -> int:
        """Make a module to run."""
        number = len(self.alive) + len(self.expected) * 1000
        while number in self.alive:
            number += 1
        self.alive[number] = nn.Identity()
        return number

    @rule(number=modules, phase=PHASES)
    def append(self, number: int, phase: Phase) -> None:
        """Append an event without moving the cursor."""
        self.order.append(ExecutionEvent(self.alive[number], phase))
        self.expected.append((number, phase))

    @rule(number=modules, phase=PHASES)
    def consume(self, number: int, phase: Phase) -> None:
        """Only the event at the cursor is consumed; anything else moves nothing."""
        fits = self.expected[self.position : self.position + 1] == [(number, phase)]

        assert self.order.consume(self.alive[number], phase) == fits

        self.position += fits

    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        """Put the cursor anywhere up to the end."""
        self.position = data.draw(st.integers(0, len(self.expected)))
        self.order.move_to(self.position)

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        """Forget the tail; the cursor stays inside."""
        length = data.draw(st.integers(0, len(self.expected)))
        self.order.truncate(length)
        del self.expected[length:]
        self.position = min(self.position, length)

    @rule(number=consumes(modules))
    def delete_module(self, number: int) -> None:
        """The order keeps no module alive."""
        del self.alive[number]

    @rule(offset=st.integers(-2, 3))
    def peek(self, offset: int) -> None:
        """Peeking looks relative to the cursor; None beyond the ends or for a dead module."""
        event = self.order.peek(offset)
        index = self.position + offset
        inside = 0 <= index < len(self.expected)
        number, phase = self.expected[index] if inside else (-1, Phase.RESTING)

        if inside and number in self.alive:
            assert event == ExecutionEvent(self.alive[number], phase)
        else:
            assert event is None

    @invariant()
    def the_cursor_and_the_living_events_agree(self) -> None:
        """Iteration passes over the dead; length counts them."""
        living = [(self.alive[n], phase) for n, phase in self.expected if n in self.alive]

        assert [tuple(event) for event in self.order] == living
        assert len(self.order) == len(self.expected)
        assert self.order.position == self.position


class TestExecutionOrder(OrderMachine.TestCase):  # type: ignore[misc,valid-type]
    """Run the machine."""

    settings = settings(max_examples=60, stateful_step_count=30)


def test_an_order_keeps_no_module_alive() -> None:
    """Without a collection of garbage, deleting the last reference empties the iteration."""
    gc.disable()
    try:
        module = nn.Identity()
        order = ExecutionOrder([ExecutionEvent(module, Phase.FORWARD)])

        del module

        assert list(order) == []
        assert len(order) == 1
    finally:
        gc.enable()
