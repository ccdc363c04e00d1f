"""Breaking one call of a verb at a time, in a package where it is known what each is good for."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fsdp_sim.errors import ConfigError
from fsdp_sim.mutation.campaign import Campaign, Mutant, mutate
from fsdp_sim.mutation.programs import FunctionProgram, named, same
from fsdp_sim.mutation.site import Verb
from fsdp_sim.mutation.subject import find, known_programs
from fsdp_sim.mutation.table import summary, survivor_lines, to_json
from tests.mutation import toy

SUBJECT = find("tests.mutation.toy")


def campaign(*functions: Callable[[torch.Tensor], Any], schedules: int = 1) -> Campaign:
    """Break every site that one call of each function reaches."""

    def program(_rank: int) -> list[Any]:
        return [function(torch.ones(4)) for function in functions]

    return mutate(SUBJECT, [FunctionProgram("toy", program, 2)], schedules=schedules)


def by_verb(mutants: tuple[Mutant, ...]) -> dict[str, list[str]]:
    """Return the verbs of each status."""
    found: dict[str, list[str]] = {}
    for mutant in mutants:
        found.setdefault(mutant.status, []).append(" + ".join(site.verb for site in mutant.sites))
    return found


def test_every_needed_call_is_killed() -> None:
    """Wait for a stream, stream context, record and wait of an event."""
    result = campaign(toy.reduced)

    assert by_verb(result.mutants) == {
        "killed": [Verb.WAIT_STREAM, Verb.RECORD_EVENT, Verb.WAIT_EVENT],
        "survived": [Verb.STREAM],
    }


@pytest.mark.parametrize(
    ("function", "verb", "kind"),
    [
        (toy.reduced_by_work, Verb.WORK_WAIT, "Race"),
        (toy.moved_by_host, Verb.SYNCHRONIZE, "Race"),
        (toy.lent, Verb.KEEP_ALIVE, "UseAfterFree"),
        (toy.released, Verb.RELEASE, "ParityError"),
    ],
)
def test_each_verb_is_killed_by_its_finding(
    function: Callable[[torch.Tensor], Any], verb: Verb, kind: str
) -> None:
    """What kills is named: a race, memory used too early, another value."""
    mutants = [mutant for mutant in campaign(function).mutants if mutant.sites[0].verb is verb]

    assert {mutant.finding.kind for mutant in mutants if mutant.finding} == {kind}


def test_an_exception_of_the_break_s_own_making_is_an_error() -> None:
    """Killed is only what a finding kills."""
    result = campaign(toy.timed)

    assert by_verb(result.mutants)["error"] == [
        Verb.RECORD_EVENT,
        Verb.RECORD_EVENT,
        Verb.SYNCHRONIZE,
    ]
    assert "killed" not in by_verb(result.mutants)


def test_two_waits_that_cover_each_other_are_killed_as_a_pair() -> None:
    """Each survives alone, with the other on the path that makes up for it; neither is redundant."""
    result = campaign(toy.waited_twice)

    assert by_verb(result.mutants)["killed"] == ["wait_stream", "wait_stream + wait_stream"]
    waits = [survivor for survivor in result.survivors if survivor.site.verb is Verb.WAIT_STREAM]
    assert [survivor.partners for survivor in waits] == [(waits[1].site,), (waits[0].site,)]
    assert not any(survivor.is_redundant for survivor in waits)


def test_a_survivor_s_proof_shows_the_pair_and_the_other_path() -> None:
    """Both operations, and the wait that orders them without the site."""
    result = campaign(toy.waited_twice)
    first = next(s for s in result.survivors if s.site.verb is Verb.WAIT_STREAM)
    line = first.site.line

    lines = list(survivor_lines(first))

    assert lines[0] == f"tests/mutation/toy.py:{line} wait_stream: the wait does nothing"
    assert lines[2].startswith("  add_.Tensor at toy.py:")
    assert f"through wait_stream at toy.py:{line + 1} on stream 0" in lines[3]
    assert lines[4] == "      in toy"


def test_a_wait_that_orders_nothing_is_redundant() -> None:
    """The proof is that there is no pair."""
    (survivor,) = campaign(toy.waited_for_nothing).survivors

    assert survivor.is_redundant
    assert list(survivor_lines(survivor))[1:] == [
        "  redundant in every program",
        "  it orders no two operations that conflict, in any program",
    ]


def test_a_finding_of_the_unbroken_program_kills_nothing() -> None:
    """Only what is new counts."""

    def program(_rank: int) -> None:
        value = torch.ones(4)
        toy.waited_for_nothing(value)
        with torch.cpu.stream(torch.cpu.Stream()):
            value.add_(1)

    result = mutate(SUBJECT, [FunctionProgram("racy", program, 1)], schedules=1)

    assert by_verb(result.mutants) == {"survived": [Verb.WAIT_STREAM]}


def test_a_wait_for_a_synchronous_collective_is_no_site() -> None:
    """It ran on the current stream; some groups' hosts must wait all the same."""
    found = by_verb(campaign(toy.reduced_by_the_group, toy.waited_for_nothing).mutants)

    assert found == {"survived": [Verb.WAIT_STREAM]}


def test_calls_of_the_program_itself_are_no_sites() -> None:
    """A site is in the package's own source."""
    files = {site.file for mutant in campaign(toy.lent).mutants for site in mutant.sites}

    assert files == {"tests/mutation/toy.py"}


def test_json_has_one_record_for_each_break() -> None:
    """The schema is fixed: killed_by is null unless killed."""
    records = json.loads(to_json(campaign(toy.waited_for_nothing, toy.reduced_by_work)))["mutants"]

    assert [list(record) for record in records] == [
        ["site", "break", "status", "killed_by", "program", "runs"]
    ] * 2
    by_break = {record["break"]: record for record in records}
    killed, left = by_break["drop Work.wait"], by_break["drop wait_stream"]
    assert (killed["status"], killed["killed_by"], killed["program"]) == ("killed", "Race", "toy")
    assert (left["status"], left["killed_by"], left["program"]) == ("survived", None, None)
    assert killed["site"].startswith("tests/mutation/toy.py:")


def test_a_campaign_is_the_same_each_time() -> None:
    """Results are data, and the same data."""
    first, second = (to_json(campaign(toy.reduced, schedules=3)) for _ in range(2))

    assert first == second


def test_the_summary_counts_sites() -> None:
    """Pairs are not counted as sites."""
    assert summary(campaign(toy.waited_twice)) == (
        "4 sites: 1 killed, 3 survived (1 redundant in every program), 0 errors; "
        "8 calls that no program makes"
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: find("no_such_package"),
            "must be one that can be imported, got 'no_such_package'",
        ),
        (lambda: find("math"), "must have Python source, got 'math'"),
        (
            lambda: known_programs("json"),
            "programs are kept for fsdp_core and torch.distributed.fsdp",
        ),
        (
            lambda: named("nowhere", 2),
            "must be module:function, file.py:function or a file of JSON",
        ),
        (
            lambda: named("tests.mutation.toy:nothing", 2),
            "must have a function 'nothing' of a rank",
        ),
        (lambda: named("nowhere.py:fn", 2), "the file of a program must exist, got nowhere.py"),
        (lambda: mutate(SUBJECT, []), "a mutation must have programs to run, got none"),
        (
            lambda: mutate(SUBJECT, [FunctionProgram("idle", lambda _rank: None, 1)]),
            "must reach synchronisation in tests.mutation.toy, got no call of any",
        ),
        (
            lambda: mutate(SUBJECT, [FunctionProgram("wrong", lambda rank: 1 // (rank - rank), 1)]),
            "program 'wrong' must run with nothing broken, got ZeroDivisionError",
        ),
    ],
)
def test_a_campaign_that_cannot_be_is_refused(call: Callable[[], Any], message: str) -> None:
    """The error says what must hold."""
    with pytest.raises(ConfigError) as caught:
        call()

    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        (torch.ones(2), torch.ones(2), True),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), False),
        (torch.tensor(float("nan")), torch.tensor(float("nan")), True),
        ([1, {"a": torch.ones(1)}], [1, {"a": torch.zeros(1)}], False),
        (float("nan"), float("nan"), True),
        (1, 1.0, False),
    ],
)
def test_results_are_compared_bit_for_bit(one: object, other: object, *, is_same: bool) -> None:
    """Tensors inside containers too."""
    assert same(one, other) is is_same
