"""Whole training programs as frozen, JSON-able data, and the code that runs them on any backend.

    spec.py        what a program is made of: frozen records; note on paths and values
    record.py      records whose repr leaves out defaults
    schema.py      records to JSON and back, strictly
    codec.py       programs to JSON and back, with their version
    tree.py        walks over the module tree: paths, units, parameters
    placements.py  what each named strategy keeps where
    copies.py      which ranks hold the same copy of a unit
    check.py       what a program must hold before it is built
    flow.py        which passes train
    exactness.py   whether its sums are exact, and the tolerance where they are not
    features.py    which features a program has, for coverage
    counts.py      how many collectives it may cost
    memory.py      what its ops say of memory
    budget.py      what its ops say of early gathers
    reduce.py      a failing program made smaller directly
    data.py        weights and inputs as formulas
    delayed.py     weight gradients that come after the backward
    model.py       the torch modules of a program
    optimizer.py   its optimizer
    passes.py      one pass over a model, sharded or not
    results.py     what runs return
    drive.py       units without hooks, driven by hand
    shard.py       its model sharded by fsdp_core
    run.py         run it on this rank of a process group
    resume.py      a checkpoint between two steps, and models that were dropped
    shards.py      put the rows of all ranks together
    parity.py      run it simulated, with every check, and compare it with the unsharded run

The first fifteen import no torch, and none imports hypothesis or pytest; ``run`` and ``build`` below are
loaded when first asked for.
"""

from typing import TYPE_CHECKING, Any

from fsdp_sim.program.check import SpecError, check_program
from fsdp_sim.program.codec import dump_program, load_program
from fsdp_sim.program.schema import SchemaError
from fsdp_sim.program.spec import (
    CallsSpec,
    ContextSpec,
    LayerSpec,
    ModuleSpec,
    OptimizerSpec,
    OwnerSpec,
    PassSpec,
    PrecisionSpec,
    ProgramSpec,
    RaiseSpec,
    StepSpec,
    TieSpec,
    UnitSpec,
)

if TYPE_CHECKING:
    from fsdp_sim.program.run import run_program
    from fsdp_sim.program.shards import assemble

__all__ = [
    "CallsSpec",
    "ContextSpec",
    "LayerSpec",
    "ModuleSpec",
    "OptimizerSpec",
    "OwnerSpec",
    "PassSpec",
    "PrecisionSpec",
    "ProgramSpec",
    "RaiseSpec",
    "SchemaError",
    "SpecError",
    "StepSpec",
    "TieSpec",
    "UnitSpec",
    "assemble",
    "check_program",
    "dump_program",
    "load_program",
    "run_program",
]


def __getattr__(name: str) -> Any:
    """Load what needs torch when it is first asked for."""
    if name == "run_program":
        from fsdp_sim.program.run import run_program

        return run_program
    if name == "assemble":
        from fsdp_sim.program.shards import assemble

        return assemble
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
