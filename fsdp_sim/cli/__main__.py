"""``python -m fsdp_sim.cli`` is ``fsdp-sim``."""

from fsdp_sim.cli import main

main(prog_name="fsdp-sim")
