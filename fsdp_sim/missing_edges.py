"""Missing edges: one missing wait is one finding, whatever else would come right with it."""

from collections import deque

from fsdp_sim.errors import Finding

EDGES_KEPT = 256
"""Missing edges remembered for one pair of streams of one rank; older ones explain nothing any more."""


class MissingEdges:
    """The order that findings so far say is missing between two streams of a rank.

    A finding about an earlier op of one stream and a later op of another is there because nothing orders
    the first before the second.  An edge between the same streams that begins no earlier and ends no
    later would order them too: whoever adds it mends both.  So would the wait that a collective needs
    that is reported a second time because nothing ever waited for it.  A race, which is about bytes that
    are shared, is never explained away by memory that only may be.
    """

    def __init__(self) -> None:
        self._edges: dict[tuple[int, str, str], deque[tuple[int, int, Finding]]] = {}
        self._begins: dict[tuple[int, int], Finding] = {}

    def explanation_of(self, finding: Finding) -> Finding | None:
        """Return an earlier finding whose missing edge would mend this one too, or None.

        The finding itself is remembered when nothing explains it.
        """
        sites = finding.ops
        if len(sites) == 1:
            return self._begins.get((sites[0].rank, sites[0].index))
        if len(sites) != 2 or sites[0].rank != sites[1].rank:
            return None
        earlier, later = sites
        edges = self._edges.setdefault(
            (earlier.rank, earlier.stream, later.stream), deque(maxlen=EDGES_KEPT)
        )
        for begin, end, known in reversed(edges):
            is_told = finding.kind != "Race" or known.kind == "Race"
            if is_told and begin >= earlier.index and end <= later.index:
                return known
        edges.append((earlier.index, later.index, finding))
        self._begins.setdefault((earlier.rank, earlier.index), finding)
        return None
