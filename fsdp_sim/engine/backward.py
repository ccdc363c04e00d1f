"""Backward: which stream each op of a backward pass runs on, and the waits that autograd itself makes.

A node runs on the stream of its forward op and waits for its producers; gradients are added up on the
consumer's stream; a leaf's accumulation runs on the stream on which the leaf was first used; the roots
wait for the caller's stream, and the caller's stream waits for all leaves before final callbacks run.
Cross-stream gradients are protected by ``record_stream``.

Graphs whose nodes all belong to the caller's stream are left alone.

Source: torch/csrc/autograd/{engine,input_buffer}.cpp, torch 2.13 (Note [Streaming backwards]).
"""

import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fsdp_sim.engine import patches
from fsdp_sim.op import Kind

if TYPE_CHECKING:
    from fsdp_sim.engine.machine import Machine
    from fsdp_sim.engine.streams import Stream

_LEAF_STREAM = "fsdp_sim stream"
"""Key in a leaf node's metadata, which live as long as the node: a node that is kept keeps its stream."""


@dataclass(slots=True, eq=False)
class _Node:
    """A node of the graph that runs backward.

    Attributes:
        stream: where it runs.
        producers: nodes that give it gradients.
        waits: events of producers on other streams that its stream has not waited for yet.
        is_mixed: some producer runs on another stream.
    """

    node: Any
    stream: "Stream"
    is_end: bool
    consumers: "list[_Node | None]" = field(default_factory=list)
    producers: "list[_Node]" = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    is_mixed: bool = False


@dataclass(slots=True, eq=False)
class _Pass:
    """One run of the engine over a graph.

    Attributes:
        nodes: of a graph that used several streams.
        caller: the stream that was current when backward was called.
        outer: the node that called it, in a backward inside a backward.
        current: the node that ran when somebody last looked.
        ends: streams of leaves that have run, which the caller's stream joins.
    """

    nodes: dict[int, _Node]
    caller: "Stream"
    outer: Any
    current: Any
    previous: "_Pass | None"
    captured: list[_Node] = field(default_factory=list)
    ends: "dict[int, Stream]" = field(default_factory=dict)
    handles: list[Any] = field(default_factory=list)
    is_joined: bool = False


class Backward:
    """Follows one rank's backward passes."""

    def __init__(self, machine: "Machine") -> None:
        self._machine: Machine = weakref.proxy(machine)
        self._starts: list[int] = []
        self._streams: list[Stream] = []
        self.current: _Pass | None = None
        self._accumulating: dict[int, _Node] = {}
        self._plain: _Pass | None = None

    # ------------------------------------------------------------------ forward

    def note(self, stream: "Stream") -> None:
        """From the next autograd node on, forward ops run on ``stream``."""
        first = patches.next_node_number()
        if self._starts and self._starts[-1] == first:
            self._starts.pop()
            self._streams.pop()
        if not self._streams or self._streams[-1] is not stream:
            self._starts.append(first)
            self._streams.append(stream)

    def _stream_at(self, number: int) -> "Stream":
        position = bisect_right(self._starts, number) - 1
        return self._streams[position] if position >= 0 else self._machine.default_stream

    # ------------------------------------------------------------------ one pass

    @contextmanager
    def following(
        self, roots: Sequence[Any], gradients: Sequence[Any], ends: Sequence[Any]
    ) -> Iterator[None]:
        """Follow one run of autograd's engine.

        Args:
            roots: what backward was called on: tensors or gradient edges.
            gradients: of the roots.
            ends: tensors or edges whose gradients are returned instead of accumulated.
        """
        machine = self._machine
        caller = machine.stream
        run = self._begin(caller, roots, gradients, ends)
        outer_plain, self._plain = self._plain, None if run.nodes else run
        is_complete = False
        try:
            yield
            is_complete = True
        finally:
            self._plain = outer_plain
            self._end(run, is_complete=is_complete)
            machine.select(caller)

    def watch(self) -> None:
        """A hook selects a stream for good: the next node starts from its own stream all the same."""
        run = self._plain
        if run is not None and self.current is not run:
            run.current = patches.current_autograd_node()
            self._resume(run)

    def _begin(
        self,
        caller: "Stream",
        roots: Sequence[Any],
        gradients: Sequence[Any],
        ends: Sequence[Any],
    ) -> _Pass:
        """Return the pass; without nodes if only the caller's stream takes part."""
        outer = patches.current_autograd_node()
        run = _Pass({}, caller, outer, outer, self.current)
        if len(self._streams) == 1 and self._streams[0] is caller:
            return run
        nodes = self._graph(_node_of(root) for root in roots)
        self._place_leaves(nodes, caller)
        if all(node.stream is caller for node in nodes.values()):
            _let_go(nodes)
            return run
        run.nodes = nodes
        run.captured = [nodes[id(node)] for node in map(_node_of, ends) if id(node) in nodes]
        self._start_roots(run, roots, gradients)
        self._hook(run)
        self._resume(run)
        return run

    def _end(self, run: _Pass, *, is_complete: bool) -> None:
        try:
            if is_complete and self.current is run:
                self._join_ends(run)
        finally:
            self._resume(run.previous)
            self._accumulating = {}
            for handle in run.handles:
                handle.remove()
            _let_go(run.nodes)

    def _resume(self, run: _Pass | None) -> None:
        self.current = run
        self._machine.in_backward = run is not None

    def follow(self) -> None:
        """Somebody looks at the current stream: make it that of the node that runs now."""
        run = self.current
        assert run is not None
        node = patches.current_autograd_node()
        if node is run.current:
            return
        if node is run.outer:  # final callbacks
            self._join_ends(run)
        else:
            known = run.nodes.get(id(node))
            if known is not None:
                self._enter(run, known)
            elif run is self._plain:
                run.current = node
                self._machine.select(run.caller)
            # else made during this pass: it has the stream that is current

    def at_op(self, args: Iterable[Any]) -> None:
        """An op is about to run: make the current stream the one that it runs on.

        Gradients of one consumer are added up on its stream, behind all producers so far.
        """
        self.follow()
        if not self._accumulating:
            return
        for arg in args:
            consumer = self._accumulating.get(patches.address_of(arg))
            if consumer is not None:
                self._machine.select(consumer.stream)
                self._wait(consumer)
                return

    # ------------------------------------------------------------------ the graph

    def _graph(self, roots: Iterable[Any]) -> dict[int, _Node]:
        nodes: dict[int, _Node] = {}
        stack = [self._add(nodes, root) for root in roots if root is not None]
        seen = set(nodes)
        while stack:
            producer = stack.pop()
            for node, _ in producer.node.next_functions:
                if node is None:
                    producer.consumers.append(None)
                    continue
                consumer = self._add(nodes, node)
                producer.consumers.append(consumer)
                consumer.producers.append(producer)
                if id(node) not in seen:
                    seen.add(id(node))
                    stack.append(consumer)
        return nodes

    def _add(self, nodes: dict[int, _Node], node: Any) -> _Node:
        known = nodes.get(id(node))
        if known is None:
            stream = self._stream_at(patches.node_number(node))
            known = nodes[id(node)] = _Node(node, stream, is_end=not node.next_functions)
        return known

    def _place_leaves(self, nodes: dict[int, _Node], caller: "Stream") -> None:
        """A leaf belongs to the stream on which it was first used in a graph that is still alive."""
        for leaf in nodes.values():
            if not patches.is_leaf_node(leaf.node):
                continue
            kept = leaf.node.metadata.get(_LEAF_STREAM)
            stream = kept() if kept is not None else None
            if stream is None or stream.machine is not caller.machine:
                users = [(patches.node_number(user.node), user.stream) for user in leaf.producers]
                stream = min(users, key=lambda user: user[0])[1] if users else caller
                leaf.node.metadata[_LEAF_STREAM] = weakref.ref(stream)
            leaf.stream = stream

    def _hook(self, run: _Pass) -> None:
        """Watch the nodes at which streams meet; all others are seen by what they do."""
        for node in run.nodes.values():
            node.is_mixed = any(producer.stream is not node.stream for producer in node.producers)
        for node in run.nodes.values():
            gives = any(consumer is not None and consumer.is_mixed for consumer in node.consumers)
            ends_elsewhere = node.is_end and node.stream is not run.caller
            if node.is_mixed or node.waits or ends_elsewhere:
                run.handles.append(node.node.register_prehook(self._before(run, node)))
            if gives:
                run.handles.append(node.node.register_hook(self._after(run, node)))

    def _before(self, run: _Pass, node: _Node) -> Any:
        def before(_: Any) -> None:
            if run.current is not node.node:
                self._enter(run, node)

        return before

    def _after(self, run: _Pass, node: _Node) -> Any:
        def after(gradients: Any, _: Any) -> None:
            given = gradients if isinstance(gradients, tuple) else (gradients,)
            self._leave(run, node, given)

        return after

    # ------------------------------------------------------------------ order

    def _start_roots(self, run: _Pass, roots: Sequence[Any], gradients: Sequence[Any]) -> None:
        event: int | None = None
        for position, root in enumerate(roots):
            node = run.nodes.get(id(_node_of(root)))
            if node is None or node.stream is run.caller:
                continue
            if event is None:
                event = self._record(run.caller)
            node.waits.append(event)
            self._protect(gradients[position : position + 1], node.stream)

    def _enter(self, run: _Pass, node: _Node) -> None:
        run.current = node.node
        self._accumulating = {}
        self._machine.select(node.stream)
        self._wait(node)
        if node.is_end:
            run.ends[self._machine.stream_id(node.stream)] = node.stream

    def _leave(self, run: _Pass, node: _Node, gradients: Sequence[Any]) -> None:
        """The node has run: its consumers elsewhere wait for it, and may now add gradients up."""
        run.current = node.node
        self._machine.select(node.stream)
        event: int | None = None
        for consumer, gradient in zip(node.consumers, gradients, strict=False):
            if consumer is None or not isinstance(gradient, Tensor):
                continue
            if consumer.stream is not node.stream:
                if event is None:
                    event = self._record(node.stream)
                consumer.waits.append(event)
                self._protect([gradient], consumer.stream)
            if consumer.is_mixed and len(consumer.producers) > 1:
                self._accumulating[patches.address_of(gradient)] = consumer

    def _join_ends(self, run: _Pass) -> None:
        """The caller's stream waits for the leaves; final callbacks come after."""
        run.current = run.outer
        machine = self._machine
        self._accumulating = {}
        for node in run.captured:
            machine.select(node.stream)
            self._wait(node)
            run.ends[self._machine.stream_id(node.stream)] = node.stream
        run.captured = []
        machine.select(run.caller)
        if run.is_joined:
            return
        run.is_joined = True
        caller = machine.stream_id(run.caller)
        for stream in run.ends:
            if stream != caller:
                machine.emit(Kind.WAIT_STREAM, "autograd", caller, other=stream)

    def _record(self, stream: "Stream") -> int:
        event = self._machine.new_event_id()
        self._machine.emit(
            Kind.RECORD_EVENT, "autograd", self._machine.stream_id(stream), other=event
        )
        return event

    def _wait(self, node: _Node) -> None:
        stream = self._machine.stream_id(node.stream)
        for event in node.waits:
            self._machine.emit(Kind.WAIT_EVENT, "autograd", stream, other=event)
        node.waits = []

    def _protect(self, gradients: Sequence[Any], stream: "Stream") -> None:
        machine = self._machine
        for gradient in gradients:
            for tensor in _plain(gradient):
                record = machine.memory.record_of(tensor)
                machine.emit(
                    Kind.RECORD_STREAM,
                    "autograd",
                    machine.stream_id(stream),
                    other=record.ordinal,
                )


def _let_go(nodes: dict[int, _Node]) -> None:
    """Hold nothing of the graph any more: nodes refer to each other, and would do so until collected."""
    for node in nodes.values():
        node.node = None
        node.producers, node.consumers = [], []


def _node_of(root: Any) -> Any:
    """Return the node of a tensor or a gradient edge; None where there is none."""
    if not isinstance(root, Tensor):
        return root.node
    return patches.node_of(root) if root.requires_grad else None


def _plain(gradient: Any) -> Iterator[Tensor]:
    """Yield the plain tensors that a gradient is made of."""
    if not isinstance(gradient, Tensor):
        return
    if type(gradient) in patches.PLAIN_TENSORS:
        yield gradient
        return
    for inner in patches.inner_tensors(gradient):
        yield from _plain(inner)
