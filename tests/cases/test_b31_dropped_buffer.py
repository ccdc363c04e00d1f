"""B31: a reduction buffer lives until the outer reduction has read it."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, cpu, nn
from torch.profiler import record_function

import fsdp_sim
from fsdp_core import MixedPrecisionPolicy, RuntimePolicy
from fsdp_core.torch_private import reduce_scatter_single
from tests.cases.programs import Training, check_parity, mesh_of
from tests.cases.test_b28_no_sync import Factor

LAYERS = 3
POLICY = MixedPrecisionPolicy(grad_comm_dtype=torch.float32, compute_dtype=torch.bfloat16)


class Layers(nn.Module):
    """Layers whose gradients are 1, 2, 3, ... on every element."""

    def __init__(self, count: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Factor() for _ in range(count)])

    def forward(self) -> Tensor:
        """Return the sum over the layers."""
        return torch.stack([layer(1.0 + i).float() for i, layer in enumerate(self.layers)]).sum()


@pytest.mark.parametrize("overlap", [True, False])
def test_each_layer_keeps_its_own_gradient(overlap: bool) -> None:
    """pytorch#180889, #180931, #180900, #147810: on every timing of the outer reductions."""
    options = {
        "mixed_precision_policy": POLICY,
        "runtime_policy": RuntimePolicy(overlap_outer_communication=overlap),
    }
    units = [f"layers.{number}" for number in range(LAYERS)]

    def step(model: nn.Module, _rank: int, _number: int) -> None:
        model().backward()

    report = check_parity(Training(Layers, step, units, 2, (2, 2), options), poison=True)

    for rank in report.results:
        values = [each.unique().item() for each in rank[0].gradients.values() if each is not None]
        assert values == [1, 2, 3]


def reduce_layers(rank: int, keeps: bool) -> list[float]:
    """Reduce three layers by hand: the inner axis on one stream, the outer one on another."""
    mesh = mesh_of(2, 2)
    inner, outer = mesh.get_group(1), mesh.get_group(0)
    rs, ar = cpu.Stream(), cpu.Stream()
    kept: list[tuple[Tensor, cpu.Event]] = []
    results = []
    for number in range(1, LAYERS + 1):
        with record_function(f"fsdp_core::reduce_gradients layer{number}"):
            rs.wait_stream(cpu.current_stream())
            while kept:
                _, event = kept.pop()
                rs.wait_event(event)
            with cpu.stream(rs):
                partial = torch.full((8,), float(number))
                reduced = torch.empty(4)
                reduce_scatter_single(reduced, partial, inner)
            ar.wait_stream(rs)
            with cpu.stream(ar):
                dist.all_reduce(reduced, group=outer)
                results.append(reduced + 0)  # the last reader, on the stream of the reduction
            if keeps:
                event = cpu.Event()
                event.record(ar)
                kept.append((reduced, event))
            del reduced, partial
    cpu.current_stream().wait_stream(ar)
    return [float(each[0]) / 4 for each in results]


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_dropping_the_buffer_early_is_found_under_every_schedule(seed: int | None) -> None:
    """The report names both layers; the values are right all the same."""
    how = {"scheduler": "program_order"} if seed is None else {"scheduler": "pct", "seed": seed}

    report = fsdp_sim.simulate(reduce_layers, 4, args=(False,), strict=False, **how)

    assert report.results == [[1.0, 2.0, 3.0]] * 4
    reused = [each for each in report.findings if each.kind == "UseAfterFree"]
    assert [site.annotation for site in reused[0].ops] == [
        "fsdp_core::reduce_gradients layer1",
        "fsdp_core::reduce_gradients layer2",
    ]
    assert "which allocates again while 'add.Tensor' on stream 2" in reused[0].message


def test_keeping_the_buffer_until_its_reader_is_done_is_no_finding() -> None:
    """The same program with the reference held."""
    report = fsdp_sim.simulate(reduce_layers, 4, args=(True,))

    assert report.results == [[1.0, 2.0, 3.0]] * 4
