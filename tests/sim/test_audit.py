"""Audit: operators that do to bytes what their schema does not say are found, known ones are not."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fsdp_sim
from fsdp_sim.engine import dispatch
from tests.sim.litmus import on_one_rank
from tests.sim.test_determinism import train

LIBRARY = "fsdp_sim_tests"


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    """Give a library of operators that is gone after the test."""
    made = torch.library.Library(LIBRARY, "FRAGMENT")
    yield made
    made._destroy()


def define(library: torch.library.Library, schema: str, kernel: Callable[..., Tensor]) -> None:
    """Define an operator for CPU tensors."""
    library.define(schema)
    library.impl(schema.partition("(")[0], kernel, "CPU")


def audited(program: Callable[[], object]) -> str:
    """Return what the audit has to say about a program."""
    with pytest.raises(fsdp_sim.WrongSchema) as caught:
        on_one_rank(program, audit=True)
    return str(caught.value)


def test_a_write_that_the_schema_hides_is_found(library: torch.library.Library) -> None:
    """The operator and its argument are named."""

    def kernel(x: Tensor, scratch: Tensor) -> Tensor:
        scratch.add_(1)
        return x + 1

    define(library, "hidden_write(Tensor x, Tensor scratch) -> Tensor", kernel)

    said = audited(lambda: torch.ops.fsdp_sim_tests.hidden_write(torch.ones(2), torch.ones(2)))

    assert "  hidden_write writes its argument 'scratch'\n" in said


def test_memory_that_is_shared_in_secret_is_found(library: torch.library.Library) -> None:
    """A result on an argument's storage, of an operator that claims to return a new tensor."""
    define(library, "hidden_view(Tensor x) -> Tensor", lambda x: x.view(-1))

    said = audited(lambda: torch.ops.fsdp_sim_tests.hidden_view(torch.ones(2, 2)))

    assert "  hidden_view returns memory of an argument\n" in said


def test_a_view_that_is_none_is_found(library: torch.library.Library) -> None:
    """A new tensor, of an operator that claims to return a view."""
    define(library, "no_view(Tensor(a) x) -> Tensor(a)", lambda x: x.clone())

    said = audited(lambda: torch.ops.fsdp_sim_tests.no_view(torch.ones(2)))

    assert "  no_view returns new memory\n" in said


def test_what_a_schema_says_is_no_lie(library: torch.library.Library) -> None:
    """A write that is marked passes."""
    define(library, "honest(Tensor(a!) x) -> Tensor(a!)", lambda x: x.add_(1))

    on_one_rank(lambda: torch.ops.fsdp_sim_tests.honest(torch.ones(2)), audit=True)


def test_writes_into_not_a_number_are_seen() -> None:
    """Bytes are compared, so NaNs do not hide a change."""

    def program() -> None:
        x = torch.full((2,), float("nan"))
        x.add_(1)

    on_one_rank(program, audit=True)


class Zoo(nn.Module):
    """Layers whose operators are known to do more than they say, and many others."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.batch = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.group = nn.GroupNorm(2, 4)
        self.instance = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
        self.lstm, self.gru = nn.LSTM(4, 5, batch_first=True), nn.GRU(5, 5, batch_first=True)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.embedding, self.bag = nn.Embedding(10, 8, max_norm=1.0), nn.EmbeddingBag(10, 8)

    def forward(self) -> Tensor:
        """Use all of it."""
        images = self.instance(self.group(self.batch(self.conv(torch.randn(2, 3, 6, 6)))))
        series, _ = self.lstm(images.mean(-1).transpose(1, 2))
        series, _ = self.gru(series)
        text = self.block(self.embedding(torch.randint(0, 10, (2, 4))))
        bags = self.bag(torch.randint(0, 10, (2, 4)))
        scaled = F.interpolate(images, scale_factor=2, mode="bilinear")
        return sum((each.pow(2).sum() for each in (series, text, bags, scaled)), torch.zeros(()))


def run_zoo() -> None:
    """Train the zoo one step with each of several optimizers, and under autocast."""
    model = Zoo()
    optimizers = (
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        torch.optim.Adam(model.parameters(), fused=True),
        torch.optim.AdamW(model.parameters(), foreach=True),
    )
    for optimizer in optimizers:
        model().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model()
    loss.backward()


def test_the_table_of_operators_is_complete_for_common_layers() -> None:
    """Norms, recurrent layers, embeddings, attention, optimizers and autocast tell no unknown lie."""
    on_one_rank(run_zoo, audit=True)


def test_a_sharded_model_of_pytorchs_tells_no_unknown_lie() -> None:
    """FSDP2's own operators included."""
    fsdp_sim.simulate(train, 2, audit=True)


@pytest.mark.parametrize("name", ["native_batch_norm", "mkldnn_rnn_layer_backward"])
def test_every_entry_of_the_table_is_needed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the audit finds the operator again."""
    monkeypatch.setattr(dispatch, "_OPERATORS", {})
    monkeypatch.delitem(dispatch.HIDDEN_WRITES, name)

    assert f"  {name} writes its argument" in audited(run_zoo)


def test_operators_of_a_cuda_script_are_audited(library: torch.library.Library) -> None:
    """Those that keep their word are clean, moves from host to GPU and back among them."""

    def kernel(x: Tensor) -> Tensor:
        return x.add_(1) * 2

    def honest() -> float:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).to("cuda")
        loss = model(torch.ones(2, 2).to("cuda", non_blocking=True)).sum()
        loss.backward()
        return float(loss.detach().cpu())

    define(library, "hidden_on_gpu(Tensor x) -> Tensor", kernel)

    on_one_rank(honest, knobs=("cuda",), audit=True)
    with pytest.raises(fsdp_sim.WrongSchema, match=r"  hidden_on_gpu writes its argument 'x'\n"):
        on_one_rank(
            lambda: torch.ops.fsdp_sim_tests.hidden_on_gpu(torch.ones(2, device="cuda")),
            knobs=("cuda",),
            audit=True,
        )
