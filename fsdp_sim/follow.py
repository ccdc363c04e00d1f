"""Follow replay files: run the subject under the recorded schedule, and compare with what is expected."""

import shlex
from typing import TYPE_CHECKING, Any

from fsdp_sim.errors import ConfigError
from fsdp_sim.program.spec import ProgramSpec
from fsdp_sim.replay_file import ReplayFile

if TYPE_CHECKING:
    from fsdp_sim.simulation import Report


def follow_program(program: ProgramSpec, schedule: str, **options: Any) -> "Report":
    """Run a program under a schedule that must fit, and compare it with the unsharded run.

    Raises:
        Diverged: a deviation did not fit.
        Exception: as ``fsdp_sim.program.parity.verify``.
    """
    from fsdp_sim.program.parity import run_rank, verify
    from fsdp_sim.verbs import replay

    replay(run_rank, schedule, args=(program,), **options)
    return verify(program, schedule=schedule, **options)


def follow(file: ReplayFile, **options: Any) -> "Report":
    """Run the program or script of a replay file under its schedule, which must fit.

    Raises:
        ConfigError: the file is about a test, which pytest must run.
        Diverged: a deviation did not fit.
        Exception: as ``fsdp_sim.replay``.
    """
    from fsdp_sim.script import Script
    from fsdp_sim.verbs import replay

    if file.program is not None:
        return follow_program(file.program, file.schedule, **options)
    if file.script is not None:
        script = Script(file.script.path, file.script.arguments)
        with script.importing():
            return replay(script, file.schedule, **options)
    raise ConfigError("a replay file that is about a test must be followed by pytest")


def command(file: ReplayFile, path: str) -> str:
    """Return the command that follows a file kept at ``path``."""
    if file.test is not None:
        return shlex.join(["pytest", file.test.node, "--fsdp-sim-replay", path])
    return shlex.join(["fsdp-sim", "replay", path])
