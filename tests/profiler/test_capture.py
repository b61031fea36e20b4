"""Capture: the author's layers, and every cut keeps the gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from gplan.core.errors import ModelError
from gplan_profiler.capture.capture import capture
from gplan_profiler.capture.chain import Chain, detached
from tests.profiler.models import Around, Branching, ConvNet, LongSkip, Residual, Throwing, Tied, WritesIntoView
from tests.profiler.training import boundaries

IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
ROWS = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
WIDE = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))
TOKENS = torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(4))


def sequence() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 3))


MODELS: list[tuple[Callable[[], nn.Module], Tensor]] = [
    (ConvNet, IMAGES),
    (Tied, TOKENS),
    (WritesIntoView, ROWS),
    (LongSkip, WIDE),
    (sequence, IMAGES),
]


def total(output: Any) -> Tensor:
    leaves = pytree.tree_leaves(output)
    return sum((x * torch.linspace(0.5, 1.5, x.numel()).view_as(x)).sum() for x in leaves)  # type: ignore[no-any-return]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
    model.zero_grad()
    return found


def train_in_two(chain: Chain, cut: int, inputs: Tensor) -> Tensor:
    """Forward and backward over one cut, as two processes would do it."""
    sent = chain.stage(0, cut)(inputs)
    received = detached(sent)
    loss = total(chain.model_output(chain.stage(cut, len(chain))(*received)))
    loss.backward()  # type: ignore[no-untyped-call]
    pairs = [(x, y.grad) for x, y in zip(sent, received, strict=True) if y.grad is not None]
    torch.autograd.backward([x for x, _ in pairs], [y for _, y in pairs])
    return loss.detach()


@pytest.mark.parametrize(("make", "inputs"), MODELS, ids=lambda x: getattr(x, "__name__", ""))
def test_every_cut_gives_the_plain_models_loss_and_gradients(make: Callable[[], nn.Module], inputs: Tensor) -> None:
    torch.manual_seed(0)
    model = make().train()
    loss = total(model(inputs))
    loss.backward()  # type: ignore[no-untyped-call]
    plain = gradients(model)
    chain = capture(model, inputs)
    assert len(chain) >= 2
    for cut in range(1, len(chain)):
        assert torch.allclose(train_in_two(chain, cut, inputs), loss, rtol=1e-6)
        found = gradients(model)
        assert found.keys() == plain.keys()
        for name in plain:
            torch.testing.assert_close(found[name], plain[name], rtol=1e-5, atol=1e-6)


def test_layers_are_what_the_author_wrote() -> None:
    chain = capture(ConvNet(), IMAGES)
    assert chain.names == ("stem", "relu", "blocks.0", "blocks.1", "middle", "relu#2", "head")
    assert chain.kinds == ("Conv2d", "ReLU", "Residual", "Residual", "Linear", "ReLU", "Linear")


def test_a_model_inside_a_wrapper_is_opened() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = ConvNet()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)["logits"]

    assert "net.blocks.1" in capture(Wrapper(), IMAGES).names


def test_no_cut_falls_where_a_tensor_is_written_through_a_view() -> None:
    assert capture(WritesIntoView(), ROWS).names == ("first..second", "third")


@pytest.mark.parametrize("granularity", ["layer", "op"])
def test_cuts_fall_after_the_last_write_into_a_tensor_that_is_read_later(granularity: Any) -> None:
    class Padded(Around):
        """Copies samples into a padded batch in a loop and reads the mask after the blocks, as DETR does."""

        def forward(self, x: Tensor) -> Tensor:
            padded, mask = torch.zeros(x.shape), torch.ones(x.shape, dtype=torch.bool)
            for sample, row, row_mask in zip(x, padded, mask, strict=True):
                row[:3].copy_(sample[:3])
                row_mask[:3] = False
            return super().forward(padded).masked_fill(mask, 0.0) + padded

    model = Padded(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    chain = capture(model, ROWS, granularity=granularity)
    assert len(chain) > 2
    for cut in range(1, len(chain)):
        values = chain.stage(cut, len(chain))(*chain.stage(0, cut)(ROWS))
        torch.testing.assert_close(chain.model_output(values), model(ROWS))


def test_write_is_seen_by_split_views() -> None:
    class WritesBehindChunks(Around):
        def forward(self, x: Tensor) -> Tensor:
            x = x * 1.0
            left, _ = x.chunk(2, -1)
            x.add_(1.0)
            return super().forward(left.repeat(1, 2))

    model = WritesBehindChunks(nn.Linear(4, 4))
    chain = capture(model, ROWS)
    torch.testing.assert_close(chain.stage(0, len(chain))(ROWS)[0], model(ROWS))


def test_a_size_that_depends_on_data_does_not_cross_a_cut() -> None:
    class Sizes(Around):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            count = (x > 0).nonzero().shape[0]
            return self.last(self.inner(x)) * count

    model = Sizes(nn.Linear(4, 4))
    for granularity in ("layer", "op"):
        chain = capture(model, ROWS, granularity=granularity)  # type: ignore[arg-type]
        torch.testing.assert_close(chain.stage(0, len(chain))(ROWS)[0], model(ROWS))


class OnlyPositive(Around):
    """Its rows with a positive sum go through `first` and `inner`, and are returned too."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        kept = x[x.sum(1) > 0]
        hidden = self.inner(self.first(kept))
        return {"rows": hidden, "y": self.last(x + hidden.sum(0))}


def test_a_tensor_of_a_size_that_depends_on_data_does_not_cross_a_cut() -> None:
    """Such as the features of as many images as a batch has; the model's output is without them."""
    model = OnlyPositive(nn.Linear(4, 4))
    chain = capture(model, ROWS)
    assert chain.names == ("first..inner", "last")
    for rows in (ROWS, ROWS + 1.0):
        output = chain.model_output(chain.stage(1, 2)(*chain.stage(0, 1)(rows)))
        torch.testing.assert_close(output["y"], model(rows)["y"])
        assert output["rows"] is None
    assert "tensors whose size depends on data in the model's output are left out" in chain.notes[0]
    assert len(capture(model, ROWS, granularity="op")) == 1


def test_a_custom_function_under_vmap_is_traced_like_other_code() -> None:
    """As in the masks that transformers makes by torch.vmap."""

    class Chosen(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(values: Tensor, place: Tensor) -> Tensor:
            return values.index_select(0, place.reshape(1)).squeeze(0)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return None, None

    class Masks(Around):
        def forward(self, x: Tensor) -> Tensor:
            kinds = (x.detach().sum(1) > 0).long()
            mask = torch.vmap(lambda place: Chosen.apply(kinds, place))(torch.arange(len(x)))
            return super().forward(x) * mask[:, None]

    model = Masks(nn.Linear(4, 4))
    chain = capture(model, ROWS)
    assert len(chain) == 3
    torch.testing.assert_close(chain.stage(0, 3)(ROWS)[0], model(ROWS))


def test_a_backward_of_its_own_under_vmap_is_not_dropped() -> None:
    """Whether or not it can be captured."""

    class StraightThrough(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.sign()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return gradient

    class Signs(Around):
        def forward(self, x: Tensor) -> Tensor:
            noise = torch.rand_like(x)
            return super().forward(torch.vmap(StraightThrough.apply)(self.first(x)) + noise)

    # torch 2.11 traces it without its backward, which the proof of the layers finds
    with pytest.raises(ModelError, match="cannot be captured|do not compute what the model does"):
        capture(Signs(nn.Linear(4, 4)), ROWS)


def test_a_skip_is_alive_at_every_boundary_it_crosses() -> None:
    found = boundaries(capture(LongSkip(), WIDE), (WIDE,))
    assert [len(x) for x in found] == [1, 1, 2, 2, 1]


def test_a_boundary_knows_which_tensors_want_gradients() -> None:
    found = boundaries(capture(Tied(), TOKENS), (TOKENS,))
    by_dtype = {spec.dtype: spec.requires_grad for spec in found[2]}
    assert by_dtype == {torch.bool: False, torch.float32: True}


def test_stages_share_parameters() -> None:
    model = ConvNet()
    stage = capture(model, IMAGES).stage(2, 4)
    own = dict(model.named_parameters())
    for name, parameter in stage.named_parameters():
        assert parameter is own[name]
    assert {name.split(".")[0] for name, _ in stage.named_parameters()} == {"blocks"}


def test_stage_submodules_are_plain_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes a while for every part of a name such as blocks.0.norm.weight."""
    chain, asked, look_up = capture(ConvNet(), IMAGES), list[str](), nn.Module.__getattr__
    stage = chain.stage(0, len(chain))

    def noted(module: nn.Module, name: str) -> Any:
        asked.append(name)
        return look_up(module, name)

    monkeypatch.setattr(nn.Module, "__getattr__", noted)
    stage(IMAGES)
    assert sorted(asked) == sorted(name.rpartition(".")[2] for name in stage.state_dict())


def test_stage_uses_current_tensors() -> None:
    model = ConvNet()
    chain = capture(model, IMAGES)
    stage = chain.stage(0, len(chain))
    other = {name: torch.randn_like(x) for name, x in stage.named_parameters()}
    found = torch.func.functional_call(stage, other, (IMAGES,))  # which puts them there past nn.Module, for a while
    model.load_state_dict(other, strict=False)
    torch.testing.assert_close(chain.model_output(found), model(IMAGES))


def test_finding_boundaries_leaves_the_model_untouched() -> None:
    model = ConvNet()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    state = torch.random.get_rng_state()
    boundaries(capture(model, IMAGES), (IMAGES,))
    for name, x in model.state_dict().items():
        assert torch.equal(x, before[name]), name
    assert torch.equal(torch.random.get_rng_state(), state)


def test_data_dependent_branch_is_named_with_line() -> None:
    """At the first batch that takes the other branch."""
    chain = capture(model := Branching(), ROWS.abs())
    stage = chain.stage(0, len(chain))
    assert torch.equal(stage(2 * ROWS.abs())[0], model(2 * ROWS.abs()))
    with pytest.raises(ModelError) as caught:
        stage(-ROWS.abs())
    assert "models.py, line" in str(caught.value)
    assert "if x.sum() > 0:" in str(caught.value)
    assert "torch.where" in str(caught.value)
    assert "nn.Sequential" in str(caught.value)


def test_a_sequence_may_branch_on_data_inside_its_children() -> None:
    chain = capture(nn.Sequential(nn.Linear(4, 4), Branching(), nn.Linear(4, 2)), ROWS)
    assert chain.names == ("0", "1", "2")
    assert train_in_two(chain, 1, ROWS).isfinite()


def test_repeated_child_is_two_layers() -> None:
    torch.manual_seed(0)
    block, relu = nn.Linear(4, 4), nn.ReLU()
    model = nn.Sequential(block, relu, block, relu)
    chain = capture(model, ROWS)
    assert chain.kinds == ("Linear", "ReLU", "Linear", "ReLU")
    assert torch.equal(chain.stage(0, 4)(ROWS)[0], model(ROWS))


def test_sequential_subclass_is_exported() -> None:
    class Doubled(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = Doubled(nn.Linear(4, 4), nn.Linear(4, 4))
    chain = capture(model, ROWS)
    assert torch.equal(chain.stage(0, len(chain))(ROWS)[0], model(ROWS))


def test_in_place_child_works_on_a_copy() -> None:
    class Adds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x += 1.0
            return x

    chain = capture(nn.Sequential(Adds(), nn.Linear(4, 4), Adds()), ROWS)
    given = ROWS.clone()
    chain.stage(0, 1)(given)
    assert torch.equal(given, ROWS)
    for cut in (1, 2):
        assert train_in_two(chain, cut, ROWS).isfinite()


def test_a_sequence_takes_one_input() -> None:
    with pytest.raises(ModelError, match="takes one input; the model file gives 2 inputs"):
        capture(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (ROWS, ROWS))


def test_the_digest_changes_with_the_parameters_shapes() -> None:
    one, other = capture(Tied(width=8), TOKENS), capture(Tied(width=16), TOKENS)
    assert one.names == other.names
    assert one.digest() != other.digest()
    assert one.digest() == capture(Tied(width=8), TOKENS).digest()


def test_batch_norm_inside_a_block_counts_its_batches_once() -> None:
    model = nn.Sequential(Residual(3), Residual(3))
    chain = capture(model, IMAGES)
    boundaries(chain, (IMAGES,))
    assert int(model[0].norm.num_batches_tracked) == 0
    chain.stage(0, 2)(IMAGES)
    assert int(model[0].norm.num_batches_tracked) == 1


@pytest.mark.parametrize(("make", "inputs"), MODELS[:4], ids=lambda x: getattr(x, "__name__", ""))
def test_specs_match_a_real_run(make: Callable[[], nn.Module], inputs: Tensor) -> None:
    chain = capture(make(), inputs)
    assert tuple(chain.specs(i) for i in range(len(chain) + 1)) == boundaries(chain, (inputs,))


def test_the_state_of_a_layer_is_the_models_own_by_its_names() -> None:
    model = ConvNet()
    state = capture(model, IMAGES).state(2)
    names = {f"blocks.0.{name}" for name in Residual(8).state_dict()}
    assert state.keys() == names
    assert all(state[name] is model.get_parameter(name) for name in names if "conv" in name)


class Twins(nn.Module):
    """Layers that are alike but for what a test changes in one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.slopes = [1.0, 1.0, 1.0, 1.0]

    def forward(self, x: Tensor) -> Tensor:
        for layer, slope in zip(self.layers, self.slopes, strict=True):
            x = F.leaky_relu(layer(x), slope) * torch.tensor(slope)
        return x


def test_layers_that_differ_in_name_only_have_one_structure() -> None:
    chain = capture(Twins(), ROWS)
    assert chain.structure(1) == chain.structure(2) == chain.structure(3)


def test_first_layer_differs_by_requires_grad() -> None:
    chain = capture(Twins(), ROWS)
    assert chain.structure(0) != chain.structure(1)
    assert capture(Twins(), ROWS.clone().requires_grad_()).structure(0) == chain.structure(1)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.slopes.__setitem__(2, 0.5),
        lambda model: model.layers[2].requires_grad_(False),
        lambda model: model.layers[2].register_parameter("bias", None),
    ],
    ids=["a number", "frozen parameters", "no bias"],
)
def test_structures_tell_layers_apart_that_cost_differently(change: Callable[[Twins], object]) -> None:
    model = Twins()
    change(model)
    chain = capture(model, ROWS)
    assert chain.structure(2) != chain.structure(1)
    assert chain.structure(3) == chain.structure(1)


def test_inputs_that_do_not_fit_are_not_blamed_on_the_exporter() -> None:
    with pytest.raises(ModelError, match=r"ConvNet fails: .*channels") as caught:
        capture(ConvNet(), torch.randn(4, 2, 8, 8))
    assert "torch.where" not in str(caught.value)
    with pytest.raises(ModelError, match=r"cannot be captured by torch.export.*torch.where"):
        capture(Throwing(), ROWS)


@pytest.mark.parametrize("gradients", [torch.float32, torch.bfloat16, None])
def test_gradients_of_another_dtype_survive_capture(gradients: torch.dtype | None) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(torch.bfloat16)
    for x in model.parameters():
        x.grad_dtype = gradients
        x.grad = torch.ones_like(x, dtype=gradients or torch.float64)
    before = [x.grad for x in model.parameters()]
    assert len(capture(Wrapped(model), torch.ones(1, 2, dtype=torch.bfloat16))) == 2
    assert all(x.grad is y for x, y in zip(model.parameters(), before, strict=True))


class Wrapped(nn.Module):
    """Not a plain sequence, so it is traced."""

    def __init__(self, inner: nn.Sequential) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * 2
