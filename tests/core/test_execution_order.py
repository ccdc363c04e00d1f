"""ExecutionOrder: weak entries, one cursor."""

from torch import nn

from fsdp_core import ExecutionEvent, ExecutionOrder, Phase


def events(*modules: nn.Module) -> list[ExecutionEvent]:
    """One forward event for each module."""
    return [ExecutionEvent(module, Phase.FORWARD) for module in modules]


def test_repeated_occurrences_are_entries_of_their_own() -> None:
    """Whatever ran twice comes twice, in place."""
    first, second = nn.Identity(), nn.Identity()
    order = ExecutionOrder(events(first, second, first))

    assert [event.module for event in order] == [first, second, first]
    assert len(order) == 3


def test_only_the_next_event_is_consumed() -> None:
    """Another module, or another phase, moves nothing."""
    first, second = nn.Identity(), nn.Identity()
    order = ExecutionOrder(events(first, second))

    assert not order.consume(second, Phase.FORWARD)
    assert not order.consume(first, Phase.BACKWARD)
    assert order.position == 0
    assert order.consume(first, Phase.FORWARD)
    assert order.position == 1


def test_peek_looks_from_the_cursor_and_consumes_nothing() -> None:
    """The offset counts from the next event; beyond the ends there is none."""
    first, second = nn.Identity(), nn.Identity()
    order = ExecutionOrder(events(first, second))
    order.consume(first, Phase.FORWARD)

    assert order.peek() == ExecutionEvent(second, Phase.FORWARD)
    assert order.peek(-1) == ExecutionEvent(first, Phase.FORWARD)
    assert order.peek(1) is None
    assert order.peek(-2) is None
    assert order.position == 1


def test_appending_consumes_nothing() -> None:
    """A recorded event is not one that was repeated."""
    order = ExecutionOrder()
    order.append(ExecutionEvent(module := nn.Identity(), Phase.BACKWARD))

    assert order.position == 0
    assert order.peek() == ExecutionEvent(module, Phase.BACKWARD)


def test_an_order_keeps_no_module_alive() -> None:
    """Entries of deleted modules are passed over by iteration, and keep their places."""
    kept, dropped = nn.Identity(), nn.Identity()
    order = ExecutionOrder(events(dropped, kept))
    del dropped

    assert list(order) == events(kept)
    assert order.peek() is None
    assert order.peek(1) == ExecutionEvent(kept, Phase.FORWARD)


def test_truncating_moves_a_cursor_that_lies_beyond() -> None:
    """What is forgotten cannot have been consumed."""
    modules = [nn.Identity() for _ in range(3)]
    order = ExecutionOrder(events(*modules))
    order.move_to(3)
    order.truncate(1)

    assert len(order) == 1
    assert order.position == 1
