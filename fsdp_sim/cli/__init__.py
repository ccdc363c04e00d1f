"""The command line: ``fsdp-sim`` runs, explores and replays scripts, and reads traces.

Exit status: 0 clean; 1 findings, the script's own failure, traces that differ, or a break that nothing
finds; 2 wrong usage; 3 not simulated: the run could not be judged, which is neither clean nor a finding.
"""

import click

from fsdp_sim.cli.health import doctor
from fsdp_sim.cli.mutation import mutate
from fsdp_sim.cli.scripts import explore, replay, run
from fsdp_sim.cli.traces import check, trace


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Run distributed PyTorch programs on simulated ranks and check every ordering."""


for command in (run, explore, replay, check, trace, mutate, doctor):
    main.add_command(command)
