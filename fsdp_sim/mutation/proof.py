"""Why a survivor survives: for each conflicting pair that its site orders, the other path that does too."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from fsdp_sim.checkers.checker import ALLOC, FREE, WORK_KINDS
from fsdp_sim.checkers.overlap import overlaps
from fsdp_sim.mutation.graph import Graph, Node
from fsdp_sim.mutation.probe import Use
from fsdp_sim.mutation.site import EDGES, Site, Verb
from fsdp_sim.mutation.trial import Outcome
from fsdp_sim.op import Access, Op

PAIRS_SHOWN_MAX = 12


@dataclass(frozen=True)
class Pair:
    """Two ops that must be ordered, and how they are without the site.

    Attributes:
        why: "the same bytes", or that memory is used again.
        path: the waits on the other path, each as (what is waited for, the wait); None: there is none.
    """

    first: Op
    last: Op
    why: str
    path: tuple[tuple[Op, Op], ...] | None

    @property
    def place(self) -> tuple[str, ...]:
        """What makes pairs one in a report: the source lines of both ops and of the path."""
        steps = () if self.path is None else tuple(_place(wait) for _, wait in self.path)
        return (_place(self.first), _place(self.last), self.why, *steps)

    def lines(self) -> list[str]:
        """Return the pair and its path as text."""
        text = [f"{_words(self.first)}  before  {_words(self.last)}  ({self.why})"]
        if self.path is None:
            return [*text, "    no other path: the break should have been found"]
        if not self.path:
            return [*text, "    both run on one stream"]
        return text + [
            f"    through {_words(wait)}, for {_words(source)}" for source, wait in self.path
        ]


@dataclass(frozen=True)
class Proof:
    """What a survivor orders in one program.

    Attributes:
        pairs: one for each two source lines and each path.
        covering: sites on the other paths.
    """

    pairs: tuple[Pair, ...]
    covering: frozenset[Site]


def prove(site: Site, unbroken: Outcome, broken: Outcome) -> Proof:
    """Return each pair that the site orders in a program, with the path that orders it without the site.

    Args:
        site: a survivor.
        unbroken: the program's run with its ops kept.
        broken: the same with the site broken.
    """
    run = unbroken if site.verb in EDGES else broken
    use = run.uses[site]
    if site.verb in EDGES:
        pairs = _of_edges(run, use)
    elif site.verb is Verb.STREAM:
        pairs = _of_bodies(run, use)
    elif site.verb is Verb.KEEP_ALIVE:
        pairs = _of_kept(run, use)
    else:
        pairs = iter(())
    site_of = {
        (rank, index): other
        for other, used in run.uses.items()
        if other.verb in EDGES
        for rank, first, end in used.spans
        for index in range(first, end)
    }
    unique: dict[tuple[str, ...], Pair] = {}
    covering: set[Site] = set()
    for pair in pairs:
        unique.setdefault(pair.place, pair)
        for step in pair.path or ():
            covering.update(
                site_of[op.rank, op.index] for op in step if (op.rank, op.index) in site_of
            )
    return Proof(tuple(unique.values()), frozenset(covering - {site}))


def _ops(outcome: Outcome, rank: int) -> list[Op]:
    assert outcome.trace is not None, "a proof needs the ops"
    return [op for op in outcome.trace.ops if op.rank == rank]


def _spans(use: Use) -> dict[int, list[range]]:
    """Return the ops that a site made or held, by rank."""
    spans: dict[int, list[range]] = {}
    for rank, first, end in use.spans:
        spans.setdefault(rank, []).append(range(first, end))
    return dict(sorted(spans.items()))


# ---------------------------------------------------------------------- waits and records


def _of_edges(unbroken: Outcome, use: Use) -> Iterator[Pair]:
    """Give the pairs that are ordered through the site's edges, with their path without these."""
    for rank, spans in _spans(use).items():
        ops = _ops(unbroken, rank)
        mine = {index for span in spans for index in span}
        whole, rest = Graph(ops), Graph(ops, mine)
        edges = [
            (source, wait)
            for source, wait in whole.crossings
            if wait.op.index in mine or source.op.index in mine
        ]
        for first, last, why in _conflicts(ops, whole):
            if any(source.is_after(first) and last.is_after(wait) for source, wait in edges):
                yield _pair(rest, first.op, last.op, why)


def _pair(graph: Graph, first: Op, last: Op, why: str) -> Pair:
    path = graph.path(graph.nodes[first.index], graph.nodes[last.index])
    steps = None if path is None else tuple((one.op, other.op) for one, other in path)
    return Pair(first, last, why, steps)


# ---------------------------------------------------------------------- stream contexts, kept references


def _of_bodies(broken: Outcome, use: Use) -> Iterator[Pair]:
    """Give the pairs of which one op moved to another stream, as they are ordered there."""
    for rank, spans in _spans(use).items():
        ops = _ops(broken, rank)
        moved = {index for span in spans for index in span}
        graph = Graph(ops)
        for first, last, why in _conflicts(ops, graph, same_stream=True):
            if (first.op.index in moved) != (last.op.index in moved):
                yield _pair(graph, first.op, last.op, why)


def _of_kept(broken: Outcome, use: Use) -> Iterator[Pair]:
    """Give the uses of memory that was let go at once, and what may have taken it."""
    for rank in sorted({rank for rank, _ in use.storages}):
        kept = {storage for at, storage in use.storages if at == rank}
        ops = _ops(broken, rank)
        graph = Graph(ops)
        for first, last, storage in _reuses(ops, graph):
            if storage in kept:
                yield _pair(graph, first.op, last.op, "its memory may be used again")


# ---------------------------------------------------------------------- conflicts


def _conflicts(
    ops: Sequence[Op], graph: Graph, *, same_stream: bool = False
) -> Iterator[tuple[Node, Node, str]]:
    """Give pairs of ops that must be ordered: of each stream, the last conflicting one before an op.

    Earlier ones on that stream are ordered through it.
    """
    seen: dict[int, dict[int, list[tuple[Access, Op]]]] = {}
    for op in ops:
        if op.kind is FREE:
            seen.pop(op.other, None)
        if op.kind not in WORK_KINDS:
            continue
        for access in op.accesses:
            streams = seen.setdefault(access.storage, {})
            for stream, earlier in streams.items():
                if stream != op.stream or same_stream:
                    found = _last_conflict(earlier, access)
                    if found is not None and found is not op:
                        yield graph.nodes[found.index], graph.nodes[op.index], "the same bytes"
            streams.setdefault(op.stream, []).append((access, op))
    for first, last, _ in _reuses(ops, graph):
        yield first, last, "its memory may be used again"


def _last_conflict(earlier: Sequence[tuple[Access, Op]], access: Access) -> Op | None:
    for other, op in reversed(earlier):
        if (access.write or other.write) and _overlap(other, access):
            return op
    return None


def _overlap(one: Access, other: Access) -> bool:
    if one.strides is None and other.strides is None:
        return one.lo < other.hi and other.lo < one.hi
    return overlaps(one.lo, one.hi, one.strides, other.lo, other.hi, other.strides)


def _reuses(ops: Iterable[Op], graph: Graph) -> Iterator[tuple[Node, Node, int]]:
    """Give each last use of a freed block on a foreign stream, and the allocation that may take it."""
    home: dict[int, int] = {}
    users: dict[int, dict[int, Op]] = {}
    freed: dict[int, list[tuple[int, dict[int, Op]]]] = {}
    for op in ops:
        if op.kind is ALLOC:
            for storage, foreign in freed.pop(op.stream, ()):
                for user in foreign.values():
                    yield graph.nodes[user.index], graph.nodes[op.index], storage
            home[op.other] = op.stream
        elif op.kind is FREE and op.other in home:
            freed.setdefault(home.pop(op.other), []).append((op.other, users.pop(op.other, {})))
        elif op.kind in WORK_KINDS:
            for access in op.accesses:
                if home.get(access.storage, op.stream) != op.stream:
                    users.setdefault(access.storage, {})[op.stream] = op


# ---------------------------------------------------------------------- words


def _place(op: Op) -> str:
    return f"{op.source}" if op.source else op.name


def _words(op: Op) -> str:
    where = f" at {PurePath(op.source.file).name}:{op.source.line}" if op.source else ""
    return f"{op.name}{where} on stream {op.stream}" if op.stream >= 0 else f"{op.name}{where}"


def proof_lines(verb: Verb, proofs: Mapping[str, Proof]) -> list[str]:
    """Return a survivor's pairs as text, each with the programs in which it came up.

    Args:
        verb: of the survivor.
        proofs: by program.
    """
    programs: dict[tuple[str, ...], list[str]] = {}
    pairs: dict[tuple[str, ...], Pair] = {}
    for program, proof in proofs.items():
        for pair in proof.pairs:
            programs.setdefault(pair.place, []).append(program)
            pairs.setdefault(pair.place, pair)
    if not pairs:
        return [_NOTHING[verb]]
    lines = []
    for place, pair in list(pairs.items())[:PAIRS_SHOWN_MAX]:
        lines += [*pair.lines(), f"    in {', '.join(programs[place])}"]
    left = len(pairs) - PAIRS_SHOWN_MAX
    return [*lines, f"and {left} more pairs"] if left > 0 else lines


_ORDERS_NOTHING = "it orders no two operations that conflict, in any program"
_NOTHING = {
    **dict.fromkeys(EDGES, _ORDERS_NOTHING),
    Verb.STREAM: "no operation of its body conflicts with one outside it, in any program",
    Verb.KEEP_ALIVE: "no memory that it keeps would be used again too early, in any program",
    Verb.RELEASE: "it gives memory back; no order depends on that",
}
