"""Bugs that generated programs did not find at first: each is found in a small program of the corpus."""

import pytest

from ci.search.plants import plants
from fsdp_sim.corpus import load_corpus
from fsdp_sim.errors import FindingError
from fsdp_sim.program.parity import verify
from fsdp_sim.replay_file import failure_of

CORPUS = load_corpus()


@pytest.mark.parametrize(
    ("bug", "program", "kind"),
    [
        ("gathered for one stream, read on any", "evaluated_on_two_streams", "Race"),
        ("gradients are kept in the compute dtype", "gradients_in_their_own_dtype", "ParityError"),
        ("a budget of 0 is no limit", "no_early_gather", "ParityError"),
        ("ranks without rows do not gather", "whole_state_of_a_rank_without_rows", "Deadlock"),
        ("split parameters share a step counter", "frozen_after_a_step_of_adam", "ParityError"),
        (
            "prefetch during recomputation",
            "recomputation_gathers_nothing_early",
            "ParityError",
        ),
    ],
)
def test_a_bug_that_was_missed_is_found_in_a_small_program(
    bug: str, program: str, kind: str
) -> None:
    """The finding names what is wrong; without the bug there is none."""
    with plants()[bug](), pytest.raises(FindingError) as caught:
        verify(CORPUS[program].program)

    assert failure_of(caught.value).kind == kind
