"""B14: whether weights are kept after a forward is obeyed on roots as on all other units."""

import pytest
import torch
from torch import nn

import fsdp_core
import fsdp_sim
from fsdp_core import FsdpModule, SchedulePolicy
from fsdp_core.unit import ShardedUnit
from tests.cases.programs import (
    SHARDED,
    Row,
    assert_resting,
    batch,
    fill,
    linear,
    loss_of,
    mesh_of,
)


def unit(module: nn.Module) -> FsdpModule:
    """The module as a unit."""
    assert isinstance(module, FsdpModule)
    return module


def full_nbytes(module: nn.Module) -> int:
    """Bytes of a unit's full weights."""
    return sum(g.full_weight.flat.untyped_storage().nbytes() for g in unit(module).fsdp_unit.groups)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("reshard", "nbytes"), [(True, 0), (False, 16), (None, 0)])
def test_a_root_keeps_its_weights_only_where_it_is_told_to(
    reshard: bool | None, nbytes: int, grad: bool
) -> None:
    """pytorch#149029, #154655, #154704, #155319: unset means True, the documented default."""

    def program(rank: int) -> tuple[int, ...]:
        said = {} if reshard is None else {"reshard_after_forward": reshard}
        roots = fill(nn.ModuleList([linear(), linear(), linear()]))
        with fsdp_core.fully_shard_context():
            for root in roots.children():
                policy = SchedulePolicy(**said)
                fsdp_core.fully_shard(root, mesh_of(2), SHARDED, schedule_policy=policy)
        sizes = []
        first, second, trained = roots.children()
        x = batch(rank)
        for root in (first, second):
            with torch.set_grad_enabled(grad):
                x = root(x)
            sizes.append(full_nbytes(root))
        loss_of(trained(x), rank).backward()
        assert_resting(roots)
        return tuple(sizes)

    assert fsdp_sim.simulate(program, 2).results == [(nbytes, nbytes)] * 2


def test_a_recursive_reshard_frees_every_unit_of_the_tree() -> None:
    """meta-pytorch/torchtune#2483: not the root's own weights alone."""

    def program(rank: int) -> tuple[list[int], list[int]]:
        model = fill(Row("first", "second"))
        policy = SchedulePolicy(reshard_after_forward=False)
        mesh = mesh_of(2)
        with fsdp_core.fully_shard_context():
            for module in (*model.children(), model):
                fsdp_core.fully_shard(module, mesh, SHARDED, schedule_policy=policy)
        with torch.no_grad():
            model(batch(rank))
        kept = [full_nbytes(child) for child in model.children()]
        unit(model).reshard(recurse=True)
        assert_resting(model)
        return kept, [full_nbytes(child) for child in model.children()]

    assert fsdp_sim.simulate(program, 2).results == [([16, 16], [0, 0])] * 2


def test_a_root_that_keeps_its_weights_all_the_same_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The defect planted: the flag is ignored on roots, and nothing else frees them."""
    monkeypatch.setattr(ShardedUnit, "_leave_forward", lambda *_args, **_options: None)

    def program(rank: int) -> int:
        root = fill(linear())
        with fsdp_core.fully_shard_context():
            fsdp_core.fully_shard(root, mesh_of(2), SHARDED)
        with torch.no_grad():
            root(batch(rank))
        return full_nbytes(root)

    assert fsdp_sim.simulate(program, 2, strict=False).results == [16, 16]
