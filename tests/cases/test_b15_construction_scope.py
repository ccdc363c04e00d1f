"""B15: units are built inside one explicit scope, and everything they need exists when it ends."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_core
import fsdp_sim
from fsdp_core import ConfigError, FsdpContext, FsdpModule, StateError
from fsdp_core.device import new_stream
from fsdp_sim.op import Kind
from tests.cases.programs import (
    SHARDED,
    Row,
    Tensors,
    assert_equal,
    batch,
    begin_step,
    fill,
    linear,
    local_rows,
    loss_of,
    mesh_of,
    ops_by_step,
    put_together,
    shard,
)


def test_sharding_outside_a_scope_raises_at_once() -> None:
    """NVIDIA/Megatron-LM#6190; the module is as it was."""

    def program(rank: int) -> type:
        layer = linear()
        with pytest.raises(StateError, match=r"inside `with fully_shard_context\(\)`"):
            fsdp_core.fully_shard(layer, mesh_of(2), SHARDED)
        return type(layer)

    assert fsdp_sim.simulate(program, 2).results == [nn.Linear] * 2


def test_a_scope_inside_a_scope_raises_at_once_and_the_outer_one_goes_on() -> None:
    """It would be unclear which one a unit joins."""

    def program(rank: int) -> None:
        model = fill(Row("first"))
        with fsdp_core.fully_shard_context() as outer:
            with (
                pytest.raises(StateError, match="must not be opened inside another one"),
                fsdp_core.fully_shard_context(),
            ):
                pass
            fsdp_core.fully_shard(model, mesh_of(2), SHARDED)
        assert isinstance(model, FsdpModule)
        assert model.context is outer
        loss_of(model(batch(rank)), rank).backward()

    fsdp_sim.simulate(program, 2)


def shard_and_raise(layer: nn.Module) -> None:
    """A scope that ends by an exception."""
    with fsdp_core.fully_shard_context():
        fsdp_core.fully_shard(layer, mesh_of(2), SHARDED)
        raise KeyError("a mistake of the user")


def test_a_scope_that_raised_is_over_and_a_new_one_works() -> None:
    """The units of the first one can never run, and say why."""

    def program(rank: int) -> None:
        lost, model = linear(), fill(Row("first"))
        with pytest.raises(KeyError):
            shard_and_raise(lost)
        shard(model, "first")
        loss_of(model(batch(rank)), rank).backward()
        with pytest.raises(StateError, match="or after one that raised"):
            lost(batch(rank))

    fsdp_sim.simulate(program, 2)


def test_roots_of_one_scope_share_its_streams_and_have_orders_of_their_own() -> None:
    """One stream of gathers and one of reductions, whatever the number of roots."""

    def program(rank: int) -> list[str]:
        roots = fill(nn.ModuleList([Row("a", "b"), Row("c", "d")]))
        context = shard(roots, "0.a", "0.b", "0", "1.c", "1.d", "1")
        begin_step(0)
        first, second = roots.children()
        loss_of(second(first(batch(rank))), rank).backward()
        return [
            f"{context.module_name(event.module)} {event.phase.value}"
            for event in context.execution_order
        ]

    report = fsdp_sim.simulate(program, 2, trace=True)

    forward = [f"{name} forward" for name in ("", "a", "b", "", "c", "d")]
    backward = [f"{name} backward" for name in ("", "d", "c", "", "b", "a")]
    assert report.results == [forward + backward] * 2
    (ops,) = ops_by_step(report)
    streams = [
        {op.stream for op in ops if op.call and (op.annotation or "").startswith(label)}
        for label in ("fsdp_core::unshard", "fsdp_core::reduce_gradients")
    ]
    assert [len(each) for each in streams] == [1, 1]
    assert streams[0] != streams[1]


def test_the_first_step_creates_no_stream() -> None:
    """Streams come with the context: what a step uses is what was there when the scope ended."""

    def program(rank: int) -> None:
        model = fill(Row("first", "second"))
        context = shard(model, "first", "second", "")
        before = (context.allgather_stream, context.inner_reduction_stream)
        loss_of(model(batch(rank)), rank).backward()
        assert before == (context.allgather_stream, context.inner_reduction_stream)

    report = fsdp_sim.simulate(program, 2, trace=True)

    used = [op.name for op in report.trace.all_ops() if op.kind is Kind.STREAM and op.rank == 0]
    made_by_the_context = [name for name in used if "fsdp_core/context.py" in name]
    assert len(made_by_the_context) == 2
    assert [name for name in used if "stream made at" in name] == made_by_the_context


def test_a_container_that_nobody_calls_is_refused_by_its_class() -> None:
    """Its hooks would never run; a list of units, which owns nothing, may be one."""

    def program(rank: int) -> str:
        layers = nn.ModuleList([linear(), linear()])
        with pytest.raises(ConfigError) as caught:
            shard(layers, "")
        shard(layers, "0", "1", "")
        return str(caught.value)

    for message in fsdp_sim.simulate(program, 2).results:
        assert "needs a forward that gathers them, got a ModuleList" in message
        assert "fully_shard([first, second], ...)" in message


def adversarial(rank: int) -> Tensors:
    """A generator and a discriminator of a context each, trained in turns; the last step's weights."""
    generator, discriminator = fill(Row("a", "b")), fill(Row("c", "d"))
    for model in (generator, discriminator):
        if dist.is_initialized():
            shard(model, *model.names, "")  # type: ignore[misc]
    parts = nn.ModuleDict({"generator": generator, "discriminator": discriminator})
    for number in range(2):
        for trained in parts.values():
            ranks = [rank] if dist.is_initialized() else [0, 1]
            for each in ranks:
                made = generator(batch(each, number))
                made = made.detach() if trained is discriminator else made
                loss_of(discriminator(made), each).backward()
            for parameter in trained.parameters():
                assert parameter.grad is not None
                parameter.grad /= len(ranks)
            torch.optim.SGD(trained.parameters(), lr=1.0).step()
            parts.zero_grad()
    return local_rows(parts)


def test_a_backward_may_go_through_two_contexts() -> None:
    """Each completes its own part, as where a generator is trained through a discriminator."""
    ranks = fsdp_sim.simulate(adversarial, 2).results

    assert_equal(put_together(ranks), adversarial(0))


class Registered(nn.Linear):
    """A class whose subclasses must say something."""

    def __init_subclass__(cls, *, key: str) -> None:
        """Take a key."""


def test_a_class_that_cannot_have_a_plain_subclass_is_refused_before_anything_changes() -> None:
    """A unit's class is one; the parameters are where they were."""

    def program(rank: int) -> tuple[str, bool]:
        model = nn.Sequential(Registered(2, 2))
        before = model[0].weight
        with pytest.raises(ConfigError) as caught:
            shard(model, "0")
        return str(caught.value), model[0].weight is before

    for message, is_untouched in fsdp_sim.simulate(program, 2).results:
        assert "got Registered, which cannot have one" in message
        assert "'key'" in message
        assert is_untouched


def test_a_stream_that_is_made_at_each_use_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect planted: what the scope should have made once nobody keeps."""
    made = property(lambda context: new_stream(context.device), lambda _context, _stream: None)
    monkeypatch.setattr(FsdpContext, "allgather_stream", made, raising=False)

    def program(rank: int) -> None:
        model = fill(Row("first", "second"))
        shard(model, "first", "second", "")
        loss_of(model(batch(rank)), rank).backward()

    report = fsdp_sim.simulate(program, 2, strict=False)

    assert {finding.kind for finding in report.findings} == {"Race", "CaptureUnsafe"}
