"""PCT: random priorities and few change points, which finds shallow ordering bugs with a known chance."""

from random import Random

from fsdp_sim.scheduler.decision import Decision

DEPTH_DEFAULT = 3
STEPS_DEFAULT = 1000
YES_ODDS = {"query": 2, "is_completed": 2, "collect": 8, "fault": 32}
"""A yes/no decision says yes once in so many times: faults and collections would drown the rest."""


class Pct:
    """Runs the rank of highest priority, and lowers it at ``depth - 1`` steps drawn beforehand.

    A bug that needs ``depth`` ordering constraints between n ranks and k steps is found by one run
    with a chance of at least 1 / (n * k ** (depth - 1)).  A rank that polls goes behind all others,
    else it would poll for ever while the rank it waits for is not run.

    Source: Burckhardt et al., "A Randomized Scheduler with Probabilistic Guarantees of Finding Bugs"
    (ASPLOS 2010), section 3.

    Args:
        seed: of the priorities and change points.
        ranks: number of ranks.
        steps: number of decisions of a run, learned from a first one.
        depth: number of ordering constraints to look for.
    """

    def __init__(
        self, *, seed: int, ranks: int, steps: int = STEPS_DEFAULT, depth: int = DEPTH_DEFAULT
    ) -> None:
        self._random = Random(seed)
        order = list(range(ranks))
        self._random.shuffle(order)
        self._priority = {rank: priority for priority, rank in enumerate(order, start=1)}
        self._lowest = 0
        changes = min(depth - 1, steps)
        self._change_steps = frozenset(self._random.sample(range(max(steps, 1)), changes))

    def choose(self, decision: Decision) -> int:
        """Return the runnable rank of highest priority, or the toss of a coin."""
        if decision.is_yes_no:
            return int(self._random.randrange(YES_ODDS.get(decision.kind, 2)) == 0)
        if decision.kind in ("poll", "query", "is_completed") and decision.running is not None:
            self._lower(decision.running)
        if decision.step in self._change_steps:
            self._lower(self._highest(decision))
        return self._highest(decision)

    def _highest(self, decision: Decision) -> int:
        return max(decision.options, key=self._priority.__getitem__)

    def _lower(self, rank: int) -> None:
        self._lowest -= 1
        self._priority[rank] = self._lowest
