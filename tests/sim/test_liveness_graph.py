"""The device graph agrees with a naive one that looks at everything, every time."""

from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import example, given

from fsdp_sim.checkers.device_graph import DeviceGraph, Launch
from fsdp_sim.clock import Clocks
from fsdp_sim.op import Call, Kind, Op

GROUPS = ((0, 1), (1, 2), (0, 2), (0, 1, 2), (0, 1))
RANKS, STREAMS = 3, 2


@dataclass(frozen=True)
class Step:
    """One rank issues the next collective of one group on one stream, perhaps after a stream wait."""

    rank: int
    group: int
    stream: int
    waits: bool = False

    @property
    def is_possible(self) -> bool:
        """Whether the rank is in the group."""
        return self.rank in GROUPS[self.group]


STEPS = st.builds(
    Step,
    rank=st.integers(0, RANKS - 1),
    group=st.integers(0, len(GROUPS) - 1),
    stream=st.integers(0, STREAMS - 1),
    waits=st.booleans(),
).filter(lambda step: step.is_possible)

Node = tuple[int, int]
"""Group and sequence number of an operation."""


@dataclass
class Naive:
    """All operations ever issued, and all edges between them."""

    parts: dict[Node, set[int]] = field(default_factory=dict)
    before: dict[Node, set[Node]] = field(default_factory=dict)
    issued: dict[int, list[tuple[Node, int, int]]] = field(default_factory=dict)

    def issue(self, step: Step, node: Node, clock: dict[int, int], tick: int) -> None:
        """Add a part and what is before it on its rank."""
        mine = self.issued.setdefault(step.rank, [])
        self.parts.setdefault(node, set()).add(step.rank)
        self.before.setdefault(node, set()).update(
            other
            for other, stream, other_tick in mine
            if clock.get(stream, 0) >= other_tick or other[0] == node[0]
        )
        mine.append((node, step.stream, tick))

    def has_cycle(self) -> bool:
        """Whether some operation is before itself."""
        left = dict(self.before)
        while left:
            free = [
                node for node, before in left.items() if not any(each in left for each in before)
            ]
            if not free:
                return True
            for node in free:
                del left[node]
        return False

    def unfinished(self) -> set[Node]:
        """Return what cannot complete: not issued by all, or behind such."""
        left = set(self.parts)
        changed = True
        while changed:
            done = {
                node
                for node in left
                if len(self.parts[node]) == len(GROUPS[node[0]]) and not (self.before[node] & left)
            }
            changed = bool(done)
            left -= done
        return left


@dataclass
class Run:
    """The real graph, and the naive one, fed the same steps."""

    graph: DeviceGraph = field(default_factory=DeviceGraph)
    naive: Naive = field(default_factory=Naive)
    clocks: list[Clocks] = field(default_factory=lambda: [Clocks() for _ in range(RANKS)])
    sequences: dict[tuple[int, int], int] = field(default_factory=dict)
    index: int = 0

    def do(self, step: Step) -> Launch:
        """Issue in both."""
        if step.waits:
            self._apply(step.rank, Kind.WAIT_STREAM, step.stream, 1 - step.stream)
        self._apply(step.rank, Kind.COLLECTIVE, step.stream, -1)
        key = (step.rank, step.group)
        sequence = self.sequences.get(key, 0)
        self.sequences[key] = sequence + 1
        clock = self.clocks[step.rank].of(step.stream)
        call = Call(
            GROUPS[step.group], str(step.group), sequence, "all_reduce", "SUM", "float32", (1,)
        )
        before = {**clock, step.stream: clock[step.stream] - 1}
        self.naive.issue(step, (step.group, sequence), before, clock[step.stream])
        return self.graph.issue(step.rank, call, clock, step.stream)

    def _apply(self, rank: int, kind: Kind, stream: int, other: int) -> None:
        self.index += 1
        self.clocks[rank].apply(Op(rank, self.index, kind, "", stream, other=other))


def left_in(graph: DeviceGraph) -> set[Node]:
    """Return the operations that the graph has not completed."""
    return {(int(each.call.group_name), each.call.sequence) for each in graph.operations()}


@given(st.lists(STEPS, max_size=40))
@example([Step(0, 0, 0), Step(0, 4, 0), Step(1, 4, 0), Step(1, 0, 0)])
@example([Step(0, 0, 0), Step(0, 2, 0), Step(1, 1, 0), Step(1, 0, 0), Step(2, 2, 0), Step(2, 1, 0)])
def test_cycles_and_completion_are_those_of_the_whole_graph(steps: list[Step]) -> None:
    """A cycle is found by the step that closes it; until then exactly the same operations complete."""
    run = Run()
    for step in steps:
        launch = run.do(step)
        edges = run.graph.cycle(launch)

        assert bool(edges) == run.naive.has_cycle()
        if edges:
            return
        run.graph.settle(launch)
        assert left_in(run.graph) == run.naive.unfinished()


@given(st.lists(STEPS, max_size=40))
def test_every_edge_of_a_cycle_is_one_of_its_rank(steps: list[Step]) -> None:
    """The rank takes part in both operations, and each edge begins where the one before ends."""
    run = Run()
    for step in steps:
        launch = run.do(step)
        edges = run.graph.cycle(launch)
        if edges:
            for edge, following in zip(edges, [*edges[1:], edges[0]]):
                assert edge.rank in edge.earlier.call.group
                assert edge.rank in edge.later.call.group
                assert edge.earlier is following.later
            return
        run.graph.settle(launch)
