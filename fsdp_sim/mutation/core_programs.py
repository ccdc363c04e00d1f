"""Programs for fsdp_core: small ones, each with a feature that orders work, then the corpus."""

from dataclasses import replace

from fsdp_sim.corpus import load_corpus
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
    UnitSpec,
)

TWO_STEPS = (StepSpec(), StepSpec())
MICROBATCHES = (StepSpec((PassSpec(), PassSpec())), StepSpec((PassSpec(), PassSpec())))
BF16 = PrecisionSpec(main_params="float32", grad_comm="float32", compute="bfloat16")

ZERO3 = UnitSpec()


def _model(unit: UnitSpec = ZERO3, **block: str) -> ModuleSpec:
    """Return a root unit with a layer of its own, above a chain of units."""
    children = [
        ModuleSpec(layer=LayerSpec(bias=True), unit=unit, **block)  # type: ignore[arg-type]
        for _ in range(3)
    ]
    return ModuleSpec(layer=LayerSpec(kind="scale"), unit=unit, children=tuple(children))


def _program(model: ModuleSpec, **fields: object) -> ProgramSpec:
    return ProgramSpec(**{"model": model, "mesh": (2,), "steps": TWO_STEPS, **fields})  # type: ignore[arg-type]


def _owners(model: ModuleSpec, ranks: int) -> tuple[OwnerSpec, ...]:
    """Give each parameter of the units below the root an owner in turn."""
    names = [
        f"{child}.{name}" for child in range(len(model.children)) for name in ("weight", "bias")
    ]
    return tuple(OwnerSpec(name, number % ranks) for number, name in enumerate(names))


def _wide(strategy: UnitSpec, **context: object) -> ProgramSpec:
    """Return a program on two axes with two microbatches."""
    return _program(
        _model(strategy),
        mesh=(2, 2),
        steps=MICROBATCHES,
        context=ContextSpec(**context),  # type: ignore[arg-type]
    )


def programs() -> dict[str, ProgramSpec]:
    """Return all programs by name, the plainest first."""
    return small_programs() | {name: entry.program for name, entry in load_corpus().items()}


def small_programs() -> dict[str, ProgramSpec]:
    """Return the programs that are kept here, by name."""
    outer = {"overlap_outer_communication": True}
    recorded = ContextSpec(prefetch_order="recorded")
    base = _program(_model())
    return {
        "zero3": base,
        "zero1": _program(_model(UnitSpec("zero1")), steps=MICROBATCHES),
        "zero2": _program(_model(UnitSpec("zero2")), steps=MICROBATCHES),
        "no_shard": _program(_model(UnitSpec("no_shard"))),
        "recorded": replace(base, context=recorded),
        "microbatches": replace(base, steps=MICROBATCHES),
        "divided": _program(_model(UnitSpec(grad_divisor=2)), steps=MICROBATCHES),
        "caller_managed": replace(base, context=ContextSpec(caller_managed_grad_sync=True)),
        "one_stream": replace(base, context=ContextSpec(overlap_allgather_reduction=False)),
        "no_prefetch": _program(_model(UnitSpec(forward_prefetch=0, backward_prefetch=0))),
        "kept_after_forward": _program(_model(UnitSpec(reshard_after_forward=False))),
        "bf16": _program(_model(UnitSpec(precision=BF16))),
        "recomputed": _program(_model(checkpoint="non_reentrant")),
        "recomputed_reentrant": _program(_model(checkpoint="reentrant")),
        "adamw": replace(base, optimizer=OptimizerSpec(kind="adamw", lr=0.25)),
        "evaluated": replace(base, steps=(StepSpec((PassSpec("no_grad"), PassSpec())), StepSpec())),
        "two_forwards": replace(base, steps=(StepSpec((PassSpec(forwards=2),)), StepSpec())),
        "input_grad": replace(base, steps=(StepSpec((PassSpec(input_grad=True),)), StepSpec())),
        "several_roots": _program(ModuleSpec(children=(_model(), _model()))),
        "failed_forward": replace(base, steps=(_failing("forward"), StepSpec(), StepSpec())),
        "failed_backward": replace(base, steps=(_failing("backward"), StepSpec(), StepSpec())),
        "hsdp": _wide(UnitSpec("hsdp")),
        "hsdp_outer": _wide(UnitSpec("hsdp"), **outer),
        "hfsdp": _wide(UnitSpec("hfsdp")),
        "hfsdp_outer": _wide(UnitSpec("hfsdp"), **outer),
        "zero1_zero2": _wide(UnitSpec("zero1_zero2"), **outer),
        "zero3_two_axes": _wide(UnitSpec(), **outer),
        "owners": _owned(),
        "prefetched_by_hand": _program(_driven_by_hand()),
        "prefetched_and_left": _prefetched_and_left(),
    }


def _failing(phase: str) -> StepSpec:
    """Return a step whose pass raises in the second unit, and is recovered from."""
    raises = RaiseSpec("1", phase)  # type: ignore[arg-type]
    return StepSpec((PassSpec(raises=raises),))


def _prefetched_and_left() -> ProgramSpec:
    """Return a program whose last forward has no backward and leaves a prefetch in flight."""
    model = ModuleSpec(LayerSpec("scale"), ZERO3, (ModuleSpec(LayerSpec(), ZERO3),))
    forward_only = PassSpec("enabled", calls=(CallsSpec("", ()),))
    context = ContextSpec(caller_managed_grad_sync=True)
    return _program(model, steps=(StepSpec((PassSpec(), forward_only)),), context=context)


def _driven_by_hand() -> ModuleSpec:
    """Return a unit without hooks and parameters, whose caller asks for a prefetch, before another unit."""
    first = ModuleSpec(unit=UnitSpec(hooks=False))
    return ModuleSpec(children=(first, ModuleSpec(layer=LayerSpec(), unit=ZERO3)))


def _owned() -> ProgramSpec:
    model = _model(UnitSpec("tensor_atomic"))
    model = replace(model, unit=UnitSpec())
    return _program(model, owners=_owners(model, 2))
