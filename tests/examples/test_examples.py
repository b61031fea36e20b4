"""The example model files: they train, export, give data by their seed and keep to what a model file may be."""

import ast
import inspect
import itertools
import re
import statistics
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.example_files import (
    EXAMPLES,
    SMALL,
    apply,
    call,
    every_file,
    every_hugging_face,
    every_runnable,
    load,
    logits,
)

FUNCTIONS = ("model", "example_inputs", "loss", "optimizer", "batches")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small models gain nothing from more threads, and on a busy machine the threads wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def part(value: Any, rows: slice) -> Any:
    return pytree.tree_map(lambda tensor: tensor[rows], value)


def are_equal(left: Any, right: Any) -> bool:
    """Whether two inputs hold the same tensors under the same names."""
    pairs = zip(pytree.tree_leaves(left), pytree.tree_leaves(right), strict=True)
    return pytree.tree_structure(left) == pytree.tree_structure(right) and all(torch.equal(x, y) for x, y in pairs)


def train(name: str, *, num_steps: int, batch_size: int, **settings: object) -> tuple[nn.Module, list[Tensor]]:
    example = load(name)
    torch.manual_seed(0)
    model = apply(example.model, **settings).train()
    optimizer = apply(example.optimizer, model.parameters(), **settings)
    losses = []
    for inputs, target in itertools.islice(apply(example.batches, batch_size, **settings), num_steps):
        optimizer.zero_grad()
        loss = example.loss(call(model, inputs), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return model, losses


# What a model file is


@every_file
def test_file_defines_documented_and_typed_functions(name: str) -> None:
    example = load(name)
    for function in (getattr(example, function_name) for function_name in FUNCTIONS):
        assert function.__doc__
        assert set(function.__annotations__) == {*inspect.signature(function).parameters, "return"}


@every_file
def test_file_does_not_import_gplan(name: str) -> None:
    nodes = list(ast.walk(ast.parse((EXAMPLES / f"{name}.py").read_text())))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "." for node in nodes if isinstance(node, ast.ImportFrom)}
    assert "torch" in imported
    assert not [module for module in imported if module.split(".")[0] in ("gplan", "gplan_profiler", "")]


@every_file
def test_a_setting_has_one_default_in_the_whole_file(name: str) -> None:
    example = load(name)
    defaults: dict[str, set[object]] = {}
    for function_name in FUNCTIONS:
        for key, parameter in inspect.signature(getattr(example, function_name)).parameters.items():
            defaults.setdefault(key, set()).add(parameter.default)
    assert "seed" in defaults and "lr" in defaults
    assert {key: values for key, values in defaults.items() if len(values) > 1} == {}


@every_file
def test_settings_in_the_command_line_of_the_docstring_exist(name: str) -> None:
    example = load(name)
    text = example.__doc__ or ""
    assert f"gplan profile examples/{name}.py" in text
    settings = re.findall(r"--set (\w+)=\d+", text)
    known = {key for function in FUNCTIONS for key in inspect.signature(getattr(example, function)).parameters}
    assert settings and set(settings) <= known


# Data


@every_file
def test_same_seed_gives_same_batches_and_another_seed_others(name: str) -> None:
    batches = load(name).batches
    first, again, other = (list(itertools.islice(batches(4, seed=seed), 3)) for seed in (1, 1, 2))
    for (inputs, target), (same_inputs, same_target), (other_inputs, _) in zip(first, again, other, strict=True):
        assert are_equal(inputs, same_inputs) and torch.equal(target, same_target)
        assert not are_equal(inputs, other_inputs)
    assert not are_equal(first[0][0], first[1][0])


@every_file
def test_example_inputs_are_the_inputs_of_a_batch(name: str) -> None:
    example = load(name)
    inputs, target = next(apply(example.batches, 3, **SMALL[name]))
    assert are_equal(apply(example.example_inputs, 3, **SMALL[name]), inputs)
    assert {len(tensor) for tensor in pytree.tree_leaves((inputs, target))} == {3}


@pytest.mark.parametrize("name", ["transformer_lm", "gpt2_hf", "llama_hf", "transformer_l"])
def test_target_is_the_next_token(name: str) -> None:
    tokens, target = next(load(name).batches(4))
    assert torch.equal(tokens[:, 1:], target[:, :-1])


def test_bert_masks_as_many_bytes_of_every_sample_and_asks_for_them() -> None:
    example = load("bert_hf")
    tokens, target = next(example.batches(8))
    masked = target != example.IGNORED
    assert torch.equal(masked.sum(dim=1), torch.full((8,), 10))  # 15 % of 64
    assert torch.equal(masked, tokens == example.MASK)
    text = example.standard_library_text().numpy().tobytes()
    assert all(bytes(row) in text for row in torch.where(masked, target, tokens).tolist())


def test_t5_decoder_reads_the_target_one_place_later_and_the_target_continues_the_text() -> None:
    example = load("t5_hf")
    inputs, target = next(example.batches(8))
    assert list(inputs) == ["input_ids", "attention_mask", "decoder_input_ids"]
    assert torch.equal(inputs["decoder_input_ids"][:, 1:], target[:, :-1])
    assert (inputs["decoder_input_ids"][:, 0] == example.START).all() and inputs["attention_mask"].all()
    text = example.standard_library_text().numpy().tobytes()
    assert all(bytes(row) in text for row in torch.cat([inputs["input_ids"], target], dim=1).tolist())


def test_transformer_l_of_the_paper_reads_sequences_of_1024() -> None:
    example = load("transformer_l")
    assert example.example_inputs(2, paper=True).shape == (2, 1024)
    assert example.example_inputs(2, paper=True, sequence_length=16).shape == (2, 16)


def test_unet_masks_hold_discs_and_background() -> None:
    _, masks = next(load("unet").batches(16))
    assert masks.unique().tolist() == [0, 1]
    assert 0.05 < masks.mean() < 0.5


# Training


@every_runnable
def test_default_model_takes_a_step_in_which_every_parameter_has_a_gradient(name: str) -> None:
    model, (loss,) = train(name, num_steps=1, batch_size=2)
    assert loss.shape == () and loss.isfinite()
    assert [key for key, parameter in model.named_parameters() if parameter.grad is None] == []
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@every_runnable
def test_loss_falls(name: str) -> None:
    _, losses = train(name, num_steps=30, batch_size=16, **SMALL[name])
    values = [loss.item() for loss in losses]
    assert statistics.mean(values[-5:]) < 0.85 * statistics.mean(values[:5])


@every_runnable
def test_exported_model_computes_the_same_logits(name: str) -> None:
    example = load(name)
    model = apply(example.model, **SMALL[name]).train()
    inputs = apply(example.example_inputs, 4, **SMALL[name])
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else ((inputs,), {})
    exported = torch.export.export(model, args, kwargs, strict=False).module()
    torch.testing.assert_close(logits(call(exported, inputs)), logits(call(model, inputs)))


@every_runnable
def test_loss_of_a_batch_is_the_mean_of_those_of_its_microbatches(name: str) -> None:
    example = load(name)
    model = apply(example.model, **SMALL[name]).eval()
    batch = next(apply(example.batches, 4, **SMALL[name]))
    pieces = [batch, part(batch, slice(0, 2)), part(batch, slice(2, 4))]
    whole, first, second = (example.loss(call(model, inputs), target) for inputs, target in pieces)
    torch.testing.assert_close(whole, (first + second) / 2)
    assert not torch.isclose(first, second)


# Errors


@pytest.mark.parametrize(
    ("name", "function", "settings", "message"),
    [
        ("transformer_lm", "model", {"width": 100, "num_heads": 3}, "width 100 cannot be split into 3 heads"),
        ("transformer_lm", "example_inputs", {"sequence_length": 3_000_000}, "sequence_length is 3000000"),
        ("amoebanet_d", "model", {"num_layers": 10}, "multiple of 3 .* not 10"),
        ("amoebanet_d", "model", {"num_layers": 0}, "multiple of 3 .* not 0"),
        ("amoebanet_d", "model", {"num_filters": 12}, "multiple of 8 .* not 12"),
        ("amoebanet_d", "example_inputs", {"image_size": 100}, "multiple of 32 .* not 100"),
        ("unet", "model", {"depth": 0}, "at least 1, .* not 0"),
        ("unet", "example_inputs", {"image_size": 36, "depth": 3}, "36 cannot be halved 3 times; .* multiple of 8"),
        ("resnet", "model", {"depth": 20}, "one of 18, 34, 50, not 20"),
        ("gpt2_hf", "model", {"width": 100, "num_heads": 3}, "width 100 cannot be split into 3 heads"),
        ("gpt2_hf", "model", {"vocabulary": 100}, "at least 256, .* not 100"),
        ("gpt2_hf", "example_inputs", {"sequence_length": 3_000_000}, "sequence_length is 3000000"),
        ("bert_hf", "model", {"width": 100, "num_heads": 3}, "width 100 cannot be split into 3 heads"),
        ("bert_hf", "model", {"vocabulary": 100}, "at least 256, .* not 100"),
        ("bert_hf", "example_inputs", {"sequence_length": 3_000_000}, "sequence_length is 3000000"),
        ("llama_hf", "model", {"width": 100, "num_heads": 20}, "width 100 cannot be split into 20 heads of an even"),
        ("llama_hf", "model", {"num_heads": 4, "num_key_value_heads": 3}, "4 heads cannot share 3 heads of keys"),
        ("llama_hf", "model", {"vocabulary": 100}, "at least 256, .* not 100"),
        ("llama_hf", "example_inputs", {"sequence_length": 3_000_000}, "sequence_length is 3000000"),
        ("t5_hf", "model", {"vocabulary": 100}, "at least 256, .* not 100"),
        ("t5_hf", "example_inputs", {"sequence_length": 3_000_000}, "3000000 and 32; choose shorter ones"),
        ("vit_hf", "model", {"width": 100, "num_heads": 3}, "width 100 cannot be split into 3 heads"),
        ("vit_hf", "model", {"image_size": 30}, "30 pixels cannot be split into patches of 4"),
        ("transformer_l", "model", {"num_layers": 0}, "at least 1, not 0"),
        ("transformer_l", "model", {"width": 100, "num_heads": 3}, "width 100 cannot be split into 3 heads"),
        ("transformer_l", "model", {"vocabulary": 100}, "at least 256, .* not 100"),
        ("transformer_l", "example_inputs", {"sequence_length": 3_000_000}, "sequence_length is 3000000"),
    ],
)
def test_wrong_setting_is_named_with_what_to_do(
    name: str, function: str, settings: dict[str, int], message: str
) -> None:
    batch_size = () if function == "model" else (4,)
    with pytest.raises(ValueError, match=message):
        getattr(load(name), function)(*batch_size, **settings)


@every_hugging_face
def test_without_transformers_a_model_file_says_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=f"{name}.py needs transformers; run: pip install transformers"):
        load(name).model()
