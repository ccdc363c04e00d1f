"""Exhaustive: every schedule with few deviations, one after the other."""

from dataclasses import dataclass

from fsdp_sim.errors import Nondeterminism
from fsdp_sim.scheduler.decision import Decision

BOUND_DEFAULT = 2


@dataclass(slots=True)
class _Branch:
    """One decision on the way to the current run."""

    options: tuple[int, ...]
    default: int
    taken: int
    untried: list[int]


class Exhaustive:
    """Depth-first search over the schedules with at most ``bound`` deviations.

    One object serves many runs: ``next`` moves to the next schedule and says whether there is one.
    Most ordering bugs need very few preemptions, so a small bound covers much of what matters.

    Source: Musuvathi and Qadeer, "Iterative Context Bounding for Systematic Testing of Multithreaded
    Programs" (PLDI 2007); Emmi et al., "Delay-Bounded Scheduling" (POPL 2011).

    Args:
        bound: deviations of a schedule, at most.
        steps: decisions at which to deviate; later ones take the default.
    """

    def __init__(self, *, bound: int = BOUND_DEFAULT, steps: int | None = None) -> None:
        self._bound = bound
        self._steps = steps
        self._path: list[_Branch] = []
        self._position = 0

    def choose(self, decision: Decision) -> int:
        """Return the current schedule's choice at this step.

        Raises:
            Nondeterminism: a run that repeats the beginning of an earlier one was offered other options.
        """
        if self._steps is not None and decision.step >= self._steps:
            return decision.default
        if self._position < len(self._path):
            branch = self._path[self._position]
            self._check_same(branch, decision)
        else:
            branch = self._branch(decision)
            self._path.append(branch)
        self._position += 1
        return branch.taken

    def next(self) -> bool:
        """Move to the next schedule; return False when all have been run."""
        self._position = 0
        while self._path:
            branch = self._path[-1]
            if branch.untried:
                branch.taken = branch.untried.pop(0)
                return True
            self._path.pop()
        return False

    def _branch(self, decision: Decision) -> _Branch:
        options = tuple(decision.options)
        deviations = sum(branch.taken != branch.default for branch in self._path)
        untried = [o for o in options if o != decision.default] if deviations < self._bound else []
        return _Branch(options, decision.default, decision.default, untried)

    def _check_same(self, branch: _Branch, decision: Decision) -> None:
        if branch.options != tuple(decision.options) or branch.default != decision.default:
            raise Nondeterminism(
                f"the same choices must lead to the same options, got {list(decision.options)} at"
                f" step {decision.step} and {list(branch.options)} there in an earlier run"
            )
