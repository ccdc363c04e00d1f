"""The programs that ever failed stay clean."""

import pytest

from fsdp_sim.corpus import load_corpus
from fsdp_sim.program.parity import verify

CORPUS = load_corpus()


@pytest.mark.parametrize("name", CORPUS)
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_a_program_that_failed_once_is_clean(name: str) -> None:
    """Parity with the unsharded run, and no finding."""
    verify(CORPUS[name].program)


def test_every_entry_says_why_it_is_kept() -> None:
    """A sentence."""
    assert all(entry.why.endswith(".") for entry in CORPUS.values())
