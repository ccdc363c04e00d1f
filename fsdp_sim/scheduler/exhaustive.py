"""Exhaustive: every schedule with few deviations, one after the other."""

from dataclasses import dataclass

from fsdp_sim.errors import Nondeterminism
from fsdp_sim.scheduler.decision import Decision
from fsdp_sim.scheduler.independence import Independence, Point

BOUND_DEFAULT = 2


@dataclass(slots=True)
class _Branch:
    """One decision on the way to the current run.

    Attributes:
        point: where the rank stands that goes on by default; None where it has only local work to do.
        untried: other options within the bound.
    """

    options: tuple[int, ...]
    default: int
    taken: int
    point: Point | None
    untried: list[int]


class Exhaustive:
    """Depth-first search over the schedules with at most ``bound`` deviations.

    Reduced, it leaves out what leads to a run equal to another one. See Note [orders that can matter].

    One object serves many runs: ``next`` moves to the next schedule and says whether there is one.
    Most ordering bugs need very few preemptions, so a small bound covers much of what matters.

    Source: Musuvathi and Qadeer, "Iterative Context Bounding for Systematic Testing of Multithreaded
    Programs" (PLDI 2007); Emmi et al., "Delay-Bounded Scheduling" (POPL 2011).

    Args:
        bound: deviations of a schedule, at most.
        steps: decisions at which to deviate; later ones take the default.
        reduced: deviate only where another rank could notice.
    """

    def __init__(
        self, *, bound: int = BOUND_DEFAULT, steps: int | None = None, reduced: bool = False
    ) -> None:
        self._bound = bound
        self._steps = steps
        self._path: list[_Branch] = []
        self._position = 0
        self._points: dict[int, Point] = {}
        self._independence = Independence()
        self._put_off: dict[Point, None] = {}
        if not reduced:
            self._independence.give_up()

    def reached(self, point: Point) -> None:
        """Learn of a point that a rank has reached, also where no other rank could go on."""
        self._points[point.rank] = point
        self._independence.learn(point)

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
        """Move to the next schedule; return False when all have been run.

        What was left out is made up for, from the start, if a later run shows that it can be noticed.
        """
        self._position = 0
        self._points.clear()
        while self._path:
            branch = self._path[-1]
            if branch.untried and self._matters(branch):
                branch.taken = branch.untried.pop(0)
                return True
            self._path.pop()
        if any(self._independence.is_noticed(point) for point in self._put_off):
            self._put_off.clear()
            return True
        return False

    def _matters(self, branch: _Branch) -> bool:
        """Return whether other options of a decision can lead to another run."""
        if self._independence.is_noticed(branch.point):
            return True
        if branch.point is not None:
            self._put_off[branch.point] = None
        return False

    def _branch(self, decision: Decision) -> _Branch:
        options = tuple(decision.options)
        if decision.kind in ("collect", "fault"):
            self._independence.give_up()
        deviations = sum(branch.taken != branch.default for branch in self._path)
        untried = [o for o in options if o != decision.default] if deviations < self._bound else []
        point = self._points.get(decision.default)
        if decision.is_yes_no or decision.kind == "poll":
            assert decision.running is not None, "a rank asks"
            point = Point(decision.running, "poll")
        return _Branch(options, decision.default, decision.default, point, untried)

    def _check_same(self, branch: _Branch, decision: Decision) -> None:
        if branch.options != tuple(decision.options) or branch.default != decision.default:
            raise Nondeterminism(
                f"the same choices must lead to the same options, got {list(decision.options)} at"
                f" step {decision.step} and {list(branch.options)} there in an earlier run"
            )
