"""B36: memory that a copy on a side stream reads must not be used again before the copy is done."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fsdp_sim

cpu: Any = torch.cpu


def offload(
    rank: int, guard: str = "none", copied: str = "view", drop: tuple[str, ...] = ("base", "view")
) -> None:
    """Copy an activation to the host on a side stream, drop it, and fill memory of its size.

    Args:
        rank: not used.
        guard: "record" marks the memory as used by the side stream, "wait" orders the streams.
        copied: which of the two names of the memory is copied and marked: its base or a view.
        drop: in which order the names go.
    """
    side = cpu.Stream()
    base = torch.ones(8)
    names = {"base": base, "view": base.view(2, 4)}
    del base
    side.wait_stream(cpu.current_stream())
    with cpu.stream(side):
        host = names[copied].clone()
    if guard == "record":
        names[copied].record_stream(side)
    if guard == "wait":
        cpu.current_stream().wait_stream(side)
    for name in drop:
        del names[name]
    torch.zeros(8).fill_(5)
    cpu.current_stream().wait_stream(side)
    host.sum().item()


def test_memory_reused_under_a_copy_on_a_side_stream_is_one_report() -> None:
    """meta-pytorch/torchtune#1867, #1936: the views hid that nobody had marked the memory."""
    report = fsdp_sim.simulate(offload, 1, strict=False)

    (finding,) = report.findings
    assert finding.kind == "UseAfterFree"
    assert "clone" in {op.name.split(".")[0] for op in finding.ops}


@pytest.mark.parametrize("guard", ["record", "wait"])
def test_a_mark_or_a_wait_protects_the_memory(guard: str) -> None:
    """Either is enough."""
    assert fsdp_sim.simulate(offload, 1, args=(guard,)).findings == ()


@given(
    st.sampled_from(["none", "record", "wait"]),
    st.sampled_from(["base", "view"]),
    st.permutations(["base", "view"]).map(tuple),
)
@settings(max_examples=12)
def test_neither_views_nor_the_order_of_drops_hide_it(
    guard: str, copied: str, drop: tuple[str, ...]
) -> None:
    """What counts is the memory, whatever name it was copied or marked by."""
    report = fsdp_sim.simulate(offload, 1, args=(guard, copied, drop), strict=False)

    kinds = [finding.kind for finding in report.findings]
    assert kinds == (["UseAfterFree"] if guard == "none" else [])
