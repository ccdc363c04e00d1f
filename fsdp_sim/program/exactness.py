"""Whether a program's sums are exact in every order, and what may differ where they are not; pure.

A weight's gradient is a whole number of at most ``4 * batch`` per use (``model.py``, Note [fold]). With a
power-of-two number of ranks and a power-of-two divisor every average is such a whole number shifted, so
sums over uses, microbatches and ranks are exact as long as their total fits the significand of each
dtype that a gradient passes through. Then every order gives the same bits.

Otherwise each of at most ``additions`` additions and two divisions rounds once, by half a unit in the last
place of the total: the relative error of a gradient against the total's bound is at most
``(additions + 2) * 2**-bits``. After the first optimizer step such runs part for good, since a fold is
not continuous: only the first step is compared.
"""

from collections import Counter

from fsdp_sim.program.spec import PassSpec, PrecisionSpec, ProgramSpec, StepSpec
from fsdp_sim.program.tree import Unit, units, walk

BITS = {"float32": 24, "bfloat16": 8, "float16": 11, None: 24}


def is_exact(program: ProgramSpec) -> bool:
    """Return whether the sharded run must equal the unsharded one bit for bit."""
    return gradient_tolerance(program) == 0.0


def gradient_tolerance(program: ProgramSpec) -> float:
    """Return by how much a gradient's element may differ; 0 where all sums are exact."""
    return max((_unit_tolerance(program, unit) for unit in units(program)), default=0.0)


def _unit_tolerance(program: ProgramSpec, unit: Unit) -> float:
    uses = max((uses_in_step(step, program) for step in program.steps), default=0)
    additions = uses * program.world_size
    bound, bits = 4 * program.batch * additions, _bits(program, unit)
    whole = _power_of_two(program.world_size) and _power_of_two(unit.spec.grad_divisor)
    if bound <= 2**bits and whole:
        return 0.0
    return (additions + 2) * bound * 2.0**-bits


def uses_in_step(step: StepSpec, program: ProgramSpec) -> int:
    """Return at most how often one layer is used on one rank in the training passes of a step."""
    ties = 1 + len(program.ties)
    return ties * sum(_uses(one, program) for one in step.passes if one.kind == "train")


def _uses(one: PassSpec, program: ProgramSpec) -> int:
    """Return a bound of the uses of one layer in one pass: repeats multiply down the tree."""
    repeats = {path: 1 for path, _ in walk(program.model)}
    for calls in one.calls:
        most = max(Counter(calls.order).values(), default=1)
        repeats[calls.path] = max(repeats[calls.path], most)
    total = 1
    for count in repeats.values():
        total *= count
    return one.forwards * total


def _bits(program: ProgramSpec, unit: Unit) -> int:
    """Return the fewest significant bits that a gradient of the unit passes through."""
    precision = unit.spec.precision or PrecisionSpec()
    bits = []
    nodes = dict(walk(program.model))
    for path in unit.members:
        layer = nodes[path].layer
        if layer is not None:
            own = {layer.dtype, layer.bias_dtype or layer.dtype}
            said = (precision.main_params, precision.main_grads, precision.compute)
            bits += [BITS[dtype] for name in said for dtype in ([name] if name else sorted(own))]
            bits.append(BITS[precision.grad_comm])
    return min(bits, default=24)


def _power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
