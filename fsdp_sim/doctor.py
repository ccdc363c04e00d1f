"""What the simulator meets on this machine: names of PyTorch it replaces, and what it would not see."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from importlib import metadata
from typing import Any

OWN_KERNELS = (
    *("triton", "flash-attn", "transformer-engine", "apex", "xformers", "deepspeed"),
    *("bitsandbytes", "torchao", "fbgemm-gpu", "torchrec", "vllm"),
)
"""Packages that launch device work of their own, past PyTorch's dispatcher."""


@dataclass(frozen=True)
class PatchedName:
    """A name of PyTorch or Python that a world replaces.

    Attributes:
        state: "replaced", "added" where this version has none, or "absent": left alone for that reason.
    """

    name: str
    state: str


def patched_names() -> list[PatchedName]:
    """Run an empty world and return every name that it replaced, in the order in which it did."""
    from fsdp_sim.engine import patches
    from fsdp_sim.verbs import simulate

    seen: dict[str, str] = {}
    undo = patches.Patches()
    for verb, otherwise in (("replace", "absent"), ("wrap", "absent"), ("define", "added")):
        original = getattr(patches.Patches, verb)
        undo.replace(patches.Patches, verb, _noting(original, seen, otherwise))
    try:
        simulate(_nothing, 1)
    finally:
        undo.undo()
    return [PatchedName(name, state) for name, state in seen.items()]


def _nothing(_rank: int) -> None:
    """Be an empty program."""


def _noting(
    original: Callable[..., None], seen: dict[str, str], otherwise: str
) -> Callable[..., None]:
    @wraps(original)
    def note(self: Any, owner: Any, name: str, value: Any) -> None:
        full = f"{_name_of(owner)}.{name}"
        if not full.startswith(f"{__package__}."):  # that is this looking itself
            seen.setdefault(full, "replaced" if hasattr(owner, name) else otherwise)
        original(self, owner, name, value)

    return note


def _name_of(owner: Any) -> str:
    own = getattr(owner, "__qualname__", None)
    if own is None:
        return str(getattr(owner, "__name__", type(owner).__name__))
    return f"{owner.__module__}.{own}"


def blind_spots() -> list[str]:
    """Return what is installed here that a simulated run would not see, a sentence each."""
    import torch

    found = []
    if torch.cuda.is_available():
        found.append(
            "CUDA is there: it is hidden inside a world, so code for it alone does not run"
        )
    found += [
        f"{name} {metadata.version(name)}: its own kernels bypass PyTorch's dispatcher, so what they read "
        "and write is not seen"
        for name in OWN_KERNELS
        if _is_installed(name)
    ]
    return found


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
