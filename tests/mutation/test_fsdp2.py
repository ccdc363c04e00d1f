"""Breaking PyTorch's FSDP2: what is found, and the proof for what is not."""

from functools import cache

from fsdp_sim.mutation import fsdp2
from fsdp_sim.mutation.campaign import Campaign, mutate
from fsdp_sim.mutation.programs import FunctionProgram
from fsdp_sim.mutation.site import Verb
from fsdp_sim.mutation.subject import find

FILES = "torch/distributed/fsdp/_fully_shard/"


@cache
def campaign() -> Campaign:
    """Break every site that plain and hybrid sharding reach, once."""
    programs = [FunctionProgram(f.__name__, f, fsdp2.RANKS) for f in (fsdp2.plain, fsdp2.hybrid)]
    return mutate(find("torch.distributed.fsdp._fully_shard"), programs, schedules=1)


def test_most_waits_are_found() -> None:
    """All but those that another path makes up for."""
    waits = [
        mutant
        for mutant in campaign().mutants
        if len(mutant.sites) == 1 and mutant.sites[0].verb in (Verb.WAIT_STREAM, Verb.WAIT_EVENT)
    ]
    killed = [mutant for mutant in waits if mutant.status == "killed"]

    assert all(site.file.startswith(FILES) for mutant in waits for site in mutant.sites)
    assert 2 * len(killed) > len(waits)
    assert {mutant.finding.kind for mutant in killed if mutant.finding} == {"Race", "UseAfterFree"}


def test_what_is_not_found_is_ordered_along_another_path() -> None:
    """No survivor is a hole in the simulator."""
    survivors = campaign().survivors
    pairs = [pair for each in survivors for proof in each.proofs.values() for pair in proof.pairs]

    assert pairs
    assert [pair.lines() for pair in pairs if pair.path is None] == []
