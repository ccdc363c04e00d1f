"""Public names: exactly these, and importable; importing them is cheap."""

import importlib
import pkgutil
import subprocess
import sys
from types import ModuleType

import pytest

import fsdp_core
import fsdp_sim

CORE_NAMES = {
    *("fully_shard", "fully_shard_context", "microbatch", "register_forward_method"),
    *("fully_shard_optimizer", "clip_grad_norm_", "save_checkpoint", "load_checkpoint"),
    *("Placements", "RowAtomic", "BlockAtomic", "TensorAtomic"),
    *("RuntimePolicy", "SchedulePolicy", "MixedPrecisionPolicy", "PrefetchOrder"),
    *("FsdpContext", "FsdpModule", "FsdpMuon", "DBuffer"),
    *("Phase", "ExecutionEvent", "ExecutionOrder", "ConfigError", "StateError"),
}
SIM_NAMES = {
    *("simulate", "explore", "Exploration", "sometimes", "replay", "Report", "Trace", "Finding"),
    *("record", "Recording"),
    *("Race", "UseAfterFree", "CollectiveMismatch", "Deadlock", "NotAtRest", "ParityError"),
    *("CaptureUnsafe", "Leak", "UnusedPrefetch", "PossibleDeadlock"),
    *(
        "StepLimit",
        "CannotRunAhead",
        "Nondeterminism",
        "Diverged",
        "HandoverTimeout",
        "UnseenThread",
    ),
    *("WrongSchema", "InjectedFault", "InjectedCrash"),
    *("ConfigError", "SimulationError", "FindingError", "Notice", "RunError"),
}
LIGHT = "import sys, {module}; print([m for m in ('torch', 'hypothesis') if m in sys.modules])"


@pytest.mark.parametrize(
    ("package", "names"), [(fsdp_core, CORE_NAMES), (fsdp_sim, SIM_NAMES)], ids=["core", "sim"]
)
def test_all_is_exact(package: ModuleType, names: set[str]) -> None:
    """What is public is decided here, and each name can be had."""
    assert sorted(package.__all__) == sorted(names)
    for name in package.__all__:
        assert getattr(package, name) is not None


@pytest.mark.parametrize("package", [fsdp_sim], ids=["sim"])
def test_no_module_is_named_like_a_public_name(package: ModuleType) -> None:
    """Importing a module must not replace the function of the same name in its package."""
    modules = {module.name for module in pkgutil.iter_modules(package.__path__)}

    assert modules & set(package.__all__) == set()


def test_every_module_can_be_imported_by_itself() -> None:
    """No module needs another one to be imported first."""
    for package in (fsdp_core, fsdp_sim):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if module.name.endswith(".__main__"):
                continue
            assert importlib.import_module(module.name).__doc__, module.name


@pytest.mark.parametrize("module", ["fsdp_sim", "fsdp_sim.pytest_plugin"])
def test_import_is_light(module: str) -> None:
    """Neither the package nor its pytest plugin imports torch or hypothesis."""
    command = [sys.executable, "-c", LIGHT.format(module=module)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout

    assert output == "[]\n"
