"""Ways to trace a model are tried in steps: mixtures of experts are captured and train as the plain model."""

from __future__ import annotations

import copy
import random
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from gplan.core.errors import ModelError
from gplan_profiler.capture.capture import capture
from gplan_profiler.capture.chain import routing_notes
from gplan_profiler.model.lazy_build import build_without_weights, to_fake_tensors
from tests.profiler.experts import CALLED, MODELS, Looped, Routed, tokens
from tests.profiler.training import assert_trained_alike, gradients, total, train_in_stages

ROWS = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("kind", MODELS)
def test_mixture_of_experts_trains_in_stages(kind: str) -> None:
    torch.manual_seed(0)
    model, plain = MODELS[kind](), MODELS[kind]()
    plain.load_state_dict(model.state_dict())
    chain = capture(model, tokens(4))
    assert chain.names == ("embedding", "blocks.0", "blocks.1", "blocks.2", "head")
    assert (
        chain.notes == () if kind not in CALLED else f"every {CALLED[kind].__name__} called as it is" in chain.notes[0]
    )
    assert any("blocks.0, blocks.1, blocks.2 depends on routing" in x for x in routing_notes(chain, how="")) == (
        kind != "dense"
    )
    for seed in (0, 1):  # other tokens take other ways
        train_in_stages(chain, range(1, len(chain)), (tokens(4, seed=seed),))
        total(plain(tokens(4, seed=seed))).backward()  # type: ignore[no-untyped-call]
        assert_trained_alike(gradients(model), gradients(plain))
    assert all(torch.equal(x, plain.get_buffer(name)) for name, x in model.named_buffers())


@pytest.mark.parametrize("kind", ["dense", "grouped", "grouped, auxiliary loss"])
def test_mixture_of_experts_without_weights(kind: str) -> None:
    model = build_without_weights(MODELS[kind], what="it")
    to_fake_tensors(model)
    assert len(capture(model, tokens(4))) == 5


def test_looped_experts_need_values() -> None:
    model = build_without_weights(MODELS["looped"], what="it")
    to_fake_tensors(model)
    with pytest.raises(
        ModelError, match=r"if token\.numel\(\) > 0:.*torch\.where or torch\.cond, or define the model as"
    ):
        capture(model, tokens(4))


def test_control_flow_of_the_model_itself_is_that_of_one_batch() -> None:
    class Stops(Routed):
        def forward(self, tokens: Tensor) -> Any:
            x = self.embedding(tokens)
            for block in self.blocks:
                if x.mean() > 100:
                    break
                x = block(x)
            return self.head(x)

    model, plain = Stops(Looped), Stops(Looped)
    plain.load_state_dict(model.state_dict())
    chain = capture(model, tokens(4))
    assert chain.names == ("embedding", "blocks.0", "blocks.1", "blocks.2", "head")
    assert chain.traced == "as it is run, with every Looped called as it is, along the path of one batch"
    train_in_stages(chain, range(1, len(chain)), (tokens(4, seed=1),))
    total(plain(tokens(4, seed=1))).backward()  # type: ignore[no-untyped-call]
    assert_trained_alike(gradients(model), gradients(plain))
    with torch.no_grad():
        model.embedding.weight.add_(1000.0)
    with pytest.raises(
        ModelError, match=r"if x\.mean\(\) > 100:.*torch\.where or torch\.cond there, or define the model"
    ):
        chain.stage(0, len(chain))(tokens(4))


class ForExport(nn.Module):
    """Calls code that cannot be traced, and other code for torch.export."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.first, self.last, self.scale = nn.Linear(4, 4), nn.Linear(4, 4), scale

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if torch.compiler.is_exporting():
            return self.last(x * self.scale)  # type: ignore[no-any-return]
        return self.last(2.0 * x if x.sum() > -1e9 else x)  # type: ignore[no-any-return]


def test_code_for_export_is_taken_where_it_computes_the_same() -> None:
    chain = capture(model := ForExport(2.0), ROWS)
    assert torch.allclose(chain.stage(0, len(chain))(ROWS)[0], model(ROWS))
    assert "traced as libraries run it for torch.export; else: GuardOnDataDependentSymNode" in chain.notes[0]
    other = capture(model := ForExport(3.0), ROWS)
    assert torch.allclose(other.stage(0, len(other))(ROWS)[0], model(ROWS))
    assert other.traced.endswith("along the path of one batch")


class Pretending(nn.Module):
    """Computes something else on the tensors of a trace."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        made: Tensor = self.last(x if type(x) is Tensor else 2.0 * x)
        return made


def test_layers_that_compute_something_else_are_refused() -> None:
    with pytest.raises(
        ModelError, match="its layers do not compute what the model does: output 1 differs; define it as"
    ):
        capture(Pretending(), ROWS)


class Scaled(nn.Module):
    """Draws a number outside torch, which may have no effect."""

    def __init__(self, effect: float) -> None:
        super().__init__()
        self.first, self.last, self.effect = nn.Linear(4, 4), nn.Linear(4, 4), effect

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(self.first(x) * (1.0 + self.effect * random.random()))
        return made


def test_numbers_drawn_outside_torch() -> None:
    assert len(capture(Scaled(0.0), ROWS)) == 2
    random.seed(7)  # not as the generator is seeded before the line is looked for
    line = r"line \d+: made: Tensor = self\.last\(.* random\.random\(\)\)\)"
    with pytest.raises(
        ModelError, match=rf"Scaled draws random numbers with Python or numpy .*{line}.*\(torch\.rand\)"
    ):
        capture(Scaled(0.5), ROWS)


class Dropping(nn.Module):
    """Has dropout, so that its results are random, and may drop the gradient that goes back through its middle."""

    def __init__(self, *, lose_gradient: bool) -> None:
        super().__init__()
        self.first, self.last, self.lose_gradient = nn.Linear(4, 4), nn.Linear(4, 4), lose_gradient

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.first(x), 0.5)
        if self.lose_gradient and x.grad_fn is not None:
            x.grad_fn.register_prehook(lambda gradients: tuple(torch.zeros_like(y) for y in gradients))
        return self.last(F.dropout(x, 0.5))


def test_layers_of_a_random_model_are_proven() -> None:
    assert len(capture(Dropping(lose_gradient=False), ROWS)) == 2
    with pytest.raises(
        ModelError, match=r"do not compute what the model does: the gradient of first\.(weight|bias) differs"
    ):
        capture(Dropping(lose_gradient=True), ROWS)


def test_experts_without_tokens_train() -> None:
    model, plain = MODELS["looped"](), MODELS["looped"]()
    plain.load_state_dict(model.state_dict())
    chain, same = capture(model, tokens(4)), torch.full((4, 6), 3)  # one token goes to two experts
    train_in_stages(chain, range(1, len(chain)), (same,))
    total(plain(same)).backward()  # type: ignore[no-untyped-call]
    expected = gradients(plain)
    assert_trained_alike(gradients(model), expected)
    unused = [name for name, _ in plain.named_parameters() if name not in expected]
    assert len(unused) == 3 * 2 * 4  # blocks, experts, weights and biases of two layers


def test_way_without_proof_is_taken_by_a_profile_or_because_of_one() -> None:
    model = build_without_weights(lambda: ForExport(2.0), what="it")
    to_fake_tensors(model)
    chain = capture(model, ROWS)
    assert "not proven, as the model has no weights" in chain.notes[0]
    assert len(capture(model, ROWS, traced=chain.traced)) == len(chain)
    with pytest.raises(ModelError, match=r"if x\.sum\(\) > -1e9"):
        capture(model, ROWS, traced="")


def test_module_that_reads_another_ones_parameters_is_not_called_as_it_is() -> None:
    model = MODELS["looped"]()
    routed: Any = model.blocks[0].routed
    routed.__dict__["head"] = model.head.weight

    def choose(x: Tensor) -> tuple[Tensor, Tensor]:
        return Looped.choose(routed, x + routed.head[0])

    routed.choose = choose
    with pytest.raises(ModelError, match=r"if token\.numel\(\) > 0"):
        capture(model, tokens(4))


def test_capture_leaves_a_called_module_as_it_was() -> None:
    model = MODELS["balanced"]()
    before = copy.deepcopy(model.state_dict())
    attributes = [set(vars(module)) for module in model.modules()]
    capture(model, tokens(4))
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert [set(vars(module)) for module in model.modules()] == attributes


LAYOUTS = {
    "rows of a": ((8, 16), (4, 30, 16), True),
    "columns of b": ((4, 8, 16), (32, 16), True),
    "inner size": ((12, 8), (8, 20), False),
    "batches": ((4, 8, 16), (4, 30, 16), True),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fake_grouped_product_is_like_the_real_one(layout: str) -> None:
    one, other, is_turned = LAYOUTS[layout]
    a, b = torch.randn(one), torch.randn(other).mT if is_turned else torch.randn(other)
    ends = None if len(one) == len(other) == 3 else torch.tensor([2, 4, 6, 8], dtype=torch.int32)
    real = F.grouped_mm(a, b, offs=ends)
    with FakeTensorMode() as mode:
        fakes = [None if x is None else mode.from_tensor(x) for x in (a, b, ends)]
        fake = F.grouped_mm(fakes[0], fakes[1], offs=fakes[2])  # type: ignore[arg-type]
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_a_trace_leaves_nothing_in_caches_of_functions() -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        @staticmethod
        @lru_cache
        def places(count: int) -> Tensor:
            return torch.arange(count).flip(0)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)[:, self.places(4)]
            return x

    model = Cached()
    chain = capture(model, ROWS)
    torch.testing.assert_close(chain.stage(0, len(chain))(ROWS)[0], model(ROWS))
