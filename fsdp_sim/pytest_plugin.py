"""The pytest plugin: marker ``fsdp_sim``, options, replay files and artefacts; light at load."""

import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Generator
from contextlib import ExitStack, suppress
from functools import wraps
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from fsdp_sim.errors import ConfigError

if TYPE_CHECKING:
    from fsdp_sim.replay_file import ReplayFile
    from fsdp_sim.testing import Scope

SCHEDULERS = ("pct", "uniform", "portfolio", "exhaustive")
ARTEFACTS_DEFAULT = ".fsdp_sim"
PART = "fsdp_sim_part"
"""The hidden fixture that makes several tests, for several workers, of a marked one."""

FACTS = "fsdp_sim"
"""The attribute of a report that holds what its test did."""

MARKER = (
    "fsdp_sim(ranks=4, ...): run the test's body as the program of each of ``ranks`` simulated ranks, "
    "in program order and under other schedules; takes the options of fsdp_sim.testing.check"
)

SCOPE: "pytest.StashKey[Scope]" = pytest.StashKey()
REPLAY: "pytest.StashKey[ReplayFile]" = pytest.StashKey()


# ---------------------------------------------------------------------- options


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options; each goes before what a test says itself."""
    group = parser.getgroup("fsdp_sim", "programs on simulated ranks (fsdp_sim)")
    group.addoption(
        "--fsdp-sim-seed", type=int, metavar="N", help="seed of the first explored schedule"
    )
    group.addoption(
        "--fsdp-sim-runs", type=_positive, metavar="N", help="schedules of each check or example"
    )
    group.addoption(
        "--fsdp-sim-scheduler", choices=SCHEDULERS, help="how other schedules are drawn"
    )
    group.addoption(
        "--fsdp-sim-time-limit",
        type=_seconds,
        metavar="SECONDS",
        help="start no further schedule of a check after so long",
    )
    group.addoption(
        "--fsdp-sim-portfolio",
        type=_positive,
        default=1,
        metavar="N",
        help="split each marked test into N, with schedules of their own, for the workers of xdist",
    )
    group.addoption(
        "--fsdp-sim-log",
        type=_natural,
        default=0,
        metavar="N",
        help="show the last N operations of a failed run",
    )
    group.addoption(
        "--fsdp-sim-replay", metavar="FILE", help="follow a replay file, and nothing else"
    )
    group.addoption(
        "--fsdp-sim-artefacts",
        default=ARTEFACTS_DEFAULT,
        metavar="DIR",
        help=f"folder of replay files and timelines of failures (default: {ARTEFACTS_DEFAULT})",
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise ArgumentTypeError(f"must be a whole number of at least 0, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise ArgumentTypeError(f"must be a finite number of seconds above 0, got {text!r}")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker; read the replay file, and collect its test where no other was asked for."""
    config.addinivalue_line("markers", MARKER)
    config.pluginmanager.register(Summary(), "fsdp_sim_summary")
    path = config.getoption("--fsdp-sim-replay")
    if path is None:
        return
    from fsdp_sim.replay_file import read

    try:
        replay = read(config.invocation_params.dir / path)
    except ConfigError as error:
        raise pytest.UsageError(f"--fsdp-sim-replay: {error}") from None
    if replay.test is None:
        raise pytest.UsageError(
            f"--fsdp-sim-replay: {path} is not about a test; follow it with: fsdp-sim replay {path}"
        )
    config.stash[REPLAY] = replay
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = [str(config.rootpath / replay.test.node)]


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say what differs from the defaults."""
    given = {
        name: config.getoption(f"--fsdp-sim-{name}")
        for name in ("seed", "runs", "scheduler", "time-limit", "replay")
    }
    said = [f"{name} {value}" for name, value in given.items() if value is not None]
    parts = config.getoption("--fsdp-sim-portfolio")
    said += [f"portfolio {parts}"] if parts > 1 else []
    return [f"fsdp_sim: {', '.join(said)}"] if said else []


# ---------------------------------------------------------------------- collection


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a marked test into several, so that workers of xdist share its schedules."""
    parts = metafunc.config.getoption("--fsdp-sim-portfolio")
    is_marked = metafunc.definition.get_closest_marker("fsdp_sim") is not None
    if parts == 1 or not is_marked or REPLAY in metafunc.config.stash:
        return
    metafunc.fixturenames.append(PART)
    ids = [f"part{part + 1}of{parts}" for part in range(parts)]
    metafunc.parametrize(PART, range(parts), ids=ids, indirect=True)


@pytest.fixture(name=PART)
def fsdp_sim_part(request: pytest.FixtureRequest) -> int:
    """Return which part of a marked test's schedules is run, counted from 0."""
    part: int = request.param
    return part


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep only the test of a replay file."""
    replay = config.stash.get(REPLAY, None)
    if replay is None:
        return
    assert replay.test is not None
    kept = [item for item in items if item.nodeid == replay.test.node]
    if not kept:
        raise pytest.UsageError(
            f"--fsdp-sim-replay: the test {replay.test.node!r} must be collected, got "
            f"{len(items)} others; was it renamed?"
        )
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse what cannot be a rank program."""
    if item.get_closest_marker("fsdp_sim") is not None and not _is_plain_function(item):
        _refuse(
            "a test marked fsdp_sim must be a plain function or a method of a plain class, got "
            f"{type(item).__name__} {item.name!r}; call fsdp_sim.testing.check in it instead"
        )


def _refuse(message: object) -> NoReturn:
    """Fail the test for how it is marked, without a traceback, which would show this file alone."""
    pytest.fail(f"ConfigError: {message}", pytrace=False)


def _is_plain_function(item: pytest.Item) -> bool:
    import inspect

    is_test_case = hasattr(getattr(item, "cls", None), "assertEqual")
    return (
        isinstance(item, pytest.Function)
        and not is_test_case
        and not inspect.iscoroutinefunction(item.obj)
    )


# ---------------------------------------------------------------------- running


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    """Run a marked test on simulated ranks, and let ``check`` know which test is running."""
    marker = pyfuncitem.get_closest_marker("fsdp_sim")
    if marker is None and "fsdp_sim.testing" not in sys.modules:
        return (yield)
    from fsdp_sim.testing import in_scope

    with ExitStack() as stack:
        here = stack.enter_context(in_scope(_scope(pyfuncitem)))
        pyfuncitem.stash[SCOPE] = here
        stack.callback(_replace_body(pyfuncitem, here, marker))
        return (yield)


def _scope(item: pytest.Function) -> "Scope":
    from fsdp_sim.testing import DEFAULTS, DEFAULTS_PER_EXAMPLE, Options, Scope

    option = item.config.getoption
    forced = Options(
        seed=option("--fsdp-sim-seed"),
        runs=option("--fsdp-sim-runs"),
        scheduler=option("--fsdp-sim-scheduler"),
        time_limit=option("--fsdp-sim-time-limit"),
    )
    callspec = getattr(item, "callspec", None)
    part = 0 if callspec is None else callspec.params.get(PART, 0)
    return Scope(
        forced=forced,
        defaults=DEFAULTS_PER_EXAMPLE if _is_hypothesis(item.obj) else DEFAULTS,
        part=part,
        parts=option("--fsdp-sim-portfolio"),
        node=_whole(item.nodeid),
        replay=item.config.stash.get(REPLAY, None),
    )


def _whole(node: str) -> str:
    """Return the name of the test that a part belongs to."""
    return re.sub(r"part\d+of\d+-|-?part\d+of\d+", "", node).replace("[]", "")


def _is_hypothesis(function: Any) -> bool:
    return bool(getattr(function, "is_hypothesis_test", False))


def _replace_body(
    item: pytest.Function, here: "Scope", marker: pytest.Mark | None
) -> Callable[[], None]:
    """Put the test's body on simulated ranks if it is marked; return what undoes that.

    Under ``@given`` it is the inner test that is replaced: Hypothesis goes on drawing on this thread.
    """
    obj = item.obj
    if not _is_hypothesis(obj):
        if marker is not None:
            item.obj = _as_program(obj, marker)
        return lambda: setattr(item, "obj", obj)
    handle = obj.hypothesis
    inner = handle.inner_test
    body = _as_program(inner, marker) if marker is not None else inner
    example = _noting(body, here, tuple(item.funcargs))
    if here.replay is not None and here.replay.test is not None:
        arguments = here.replay.test.arguments
        if arguments is not None:
            item.obj = _with_arguments(example, arguments, item.instance)
    handle.inner_test = example

    def undo() -> None:
        item.obj, handle.inner_test = obj, inner

    return undo


def _as_program(body: Callable[..., Any], marker: pytest.Mark) -> Callable[..., None]:
    """Return a function that checks ``body`` as a rank program."""
    from fsdp_sim.testing import OWN_OPTIONS, check, check_options

    if marker.args:
        _refuse(f"the marker fsdp_sim takes keywords alone, such as ranks=4, got {marker.args}")

    @wraps(body)
    def checked(*args: Any, **kwargs: Any) -> None:
        def program(_rank: int) -> None:
            body(*args, **kwargs)

        others = {name: marker.kwargs[name] for name in marker.kwargs if name not in OWN_OPTIONS}
        refused = None
        try:
            check_options(others, "the marker fsdp_sim")
            _refuse_shared(kwargs)
            check(program, **marker.kwargs)
        except ConfigError as error:
            if hasattr(error, "rank"):  # the body raised it, and its lines tell where
                raise
            refused = error
        if refused is not None:  # out here it has no context, so it is shown once
            _refuse(refused)

    return checked


def _refuse_shared(arguments: dict[str, Any]) -> None:
    """Refuse what ranks must not share: on hardware each process has its own."""
    torch = sys.modules.get("torch")
    data = sys.modules.get("hypothesis.strategies._internal.core")
    for name, value in arguments.items():
        if torch is not None and isinstance(value, torch.Tensor | torch.nn.Module):
            raise ConfigError(
                f"argument {name!r} of a test marked fsdp_sim must not be a tensor or a module, which all "
                f"ranks would share, got {type(value).__name__}; make it in the test's body"
            )
        if data is not None and isinstance(value, data.DataObject):
            raise ConfigError(
                f"argument {name!r} of a test marked fsdp_sim must be drawn before the ranks start, got "
                "data(); draw it as an argument of given"
            )


def _noting(
    body: Callable[..., Any], here: "Scope", fixtures: tuple[str, ...]
) -> Callable[..., None]:
    """Return ``body`` that tells the scope what was drawn for it."""

    @wraps(body)
    def example(*args: Any, **kwargs: Any) -> None:
        here.begin_example({name: kwargs[name] for name in kwargs if name not in fixtures})
        body(*args, **kwargs)

    return example


def _with_arguments(
    example: Callable[..., None], arguments: tuple[Any, ...], instance: object | None
) -> Callable[..., None]:
    """Return the one example of a replay file, with no draws."""
    from fsdp_sim.replay_file import decode

    drawn = {argument.name: decode(argument) for argument in arguments}
    bound = () if instance is None else (instance,)

    def replayed(**fixtures: Any) -> None:
        example(*bound, **fixtures, **drawn)

    return replayed


# ---------------------------------------------------------------------- reporting


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the failure block, write the artefacts, and carry the statistics to where they are summed."""
    report = yield
    here = item.stash.get(SCOPE, None)
    if call.when != "call" or here is None:
        return report
    from fsdp_sim import failure_report

    statistics = [failure_report.statistics(search) for search in here.searches]
    facts = {"statistics": statistics, "replay": failure_report.replay_lines(here)}
    vars(report)[FACTS] = facts  # plain data, which xdist carries along
    if call.excinfo is not None:
        _report_failure(item, call.excinfo.value, report)
    return report


def _report_failure(item: pytest.Item, error: BaseException, report: pytest.TestReport) -> None:
    from fsdp_sim import failure_report

    folder = item.config.rootpath / item.config.getoption("--fsdp-sim-artefacts")
    last = item.config.getoption("--fsdp-sim-log")
    for failed in failure_report.failures(error):
        text = failure_report.failure_block(failed, folder, item.config.rootpath, last_ops=last)
        report.sections.append(("fsdp_sim", text))
    if item.get_closest_marker("fsdp_sim") is not None:
        report.longrepr = failure_report.plain_text(error) or report.longrepr


class Summary:
    """Sums up what all tests did; with xdist it does so in the process that prints."""

    def __init__(self) -> None:
        self.statistics: list[dict[str, Any]] = []
        self.replay: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take in what a test did."""
        facts = vars(report).get(FACTS)
        if facts is not None:
            self.statistics += facts["statistics"]
            self.replay += facts["replay"]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print what was run, what was never exercised, and what came of a replay."""
        if self.statistics:
            from fsdp_sim.failure_report import summary_lines

            for line in summary_lines(self.statistics):
                terminalreporter.write_line(line)
        for line in self.replay:
            terminalreporter.write_line(line)
