"""The example model files: they train, export, have the published sizes and keep to what a model file may be."""

import ast
import importlib.util
import inspect
import itertools
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

EXAMPLES = Path(__file__).parent.parent / "examples"
FUNCTIONS = ("model", "example_inputs", "loss", "optimizer", "batches")
SMALL: dict[str, dict[str, int]] = {  # settings small enough to train in a second
    "transformer_lm": {"num_blocks": 2, "width": 32, "num_heads": 2, "sequence_length": 16},
    "amoebanet_d": {"num_filters": 16, "image_size": 64},
    "unet": {"depth": 2, "width": 4, "image_size": 32},
    "resnet": {"width": 8, "image_size": 32},
    "gpt2_hf": {"num_blocks": 2, "width": 32, "num_heads": 2, "sequence_length": 16},
}
NEEDS_TRANSFORMERS = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
RUNNABLE = [pytest.param(name, marks=NEEDS_TRANSFORMERS if name == "gpt2_hf" else ()) for name in SMALL]
every_file = pytest.mark.parametrize("name", SMALL)
every_runnable = pytest.mark.parametrize("name", RUNNABLE)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small models gain nothing from more threads, and on a busy machine the threads wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def apply(function: Callable[..., Any], *args: object, **settings: object) -> Any:
    """Calls the function with those settings that it has, as `--set` does."""
    known = inspect.signature(function).parameters
    return function(*args, **{key: value for key, value in settings.items() if key in known})


def meta_model(name: str, **settings: object) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = load(name).model(**settings)
    return model


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def logits(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits


def train(name: str, *, num_steps: int, batch_size: int, **settings: object) -> tuple[nn.Module, list[Tensor]]:
    example = load(name)
    torch.manual_seed(0)
    model = apply(example.model, **settings).train()
    optimizer = apply(example.optimizer, model.parameters(), **settings)
    losses = []
    for inputs, target in itertools.islice(apply(example.batches, batch_size, **settings), num_steps):
        optimizer.zero_grad()
        loss = example.loss(model(inputs), target)
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
    assert not [module for module in imported if module.split(".")[0] in ("gplan", "profiler", "")]


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
        assert torch.equal(inputs, same_inputs) and torch.equal(target, same_target)
        assert not torch.equal(inputs, other_inputs)
    assert not torch.equal(first[0][0], first[1][0])


@every_file
def test_example_inputs_are_the_inputs_of_a_batch(name: str) -> None:
    example = load(name)
    inputs, target = next(apply(example.batches, 3, **SMALL[name]))
    assert torch.equal(apply(example.example_inputs, 3, **SMALL[name]), inputs)
    assert len(inputs) == len(target) == 3


@pytest.mark.parametrize("name", ["transformer_lm", "gpt2_hf"])
def test_target_is_the_next_token(name: str) -> None:
    tokens, target = next(load(name).batches(4))
    assert torch.equal(tokens[:, 1:], target[:, :-1])


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
    exported = torch.export.export(model, (inputs,), strict=False).module()
    torch.testing.assert_close(logits(exported(inputs)), logits(model(inputs)))


# Sizes


@pytest.mark.parametrize(
    ("num_layers", "num_filters", "expected"),
    [
        (18, 128, 31_694_440),
        (18, 208, 81_505_540),
        (18, 256, 122_470_120),
        (18, 416, 319_024_120),
        (18, 544, 542_734_840),
        (36, 544, 1_055_832_376),
        (72, 512, 1_844_858_344),
    ],
)
def test_amoebanet_has_the_parameters_of_the_gpipe_paper(num_layers: int, num_filters: int, expected: int) -> None:
    model = meta_model("amoebanet_d", num_layers=num_layers, num_filters=num_filters, num_classes=1000)
    assert num_parameters(model) == expected


@pytest.mark.parametrize(("depth", "expected"), [(18, 11_689_512), (34, 21_797_672), (50, 25_557_032)])
def test_resnet_has_the_parameters_of_the_imagenet_models(depth: int, expected: int) -> None:
    assert num_parameters(meta_model("resnet", depth=depth, width=64, num_classes=1000)) == expected


def test_unet_has_the_parameters_of_the_original_size_with_batch_norm() -> None:
    assert num_parameters(meta_model("unet", depth=4, width=64)) == 31_036_481


@NEEDS_TRANSFORMERS
def test_gpt2_has_the_parameters_of_gpt2_small() -> None:
    settings = {"num_blocks": 12, "width": 768, "num_heads": 12, "vocabulary": 50257, "sequence_length": 1024}
    assert num_parameters(meta_model("gpt2_hf", **settings)) == 124_439_808


@pytest.mark.parametrize("tie_embedding", [False, True])
def test_transformer_has_the_parameters_of_the_closed_form(tie_embedding: bool) -> None:
    model = meta_model(
        "transformer_lm", num_blocks=3, width=64, num_heads=2, sequence_length=16, tie_embedding=tie_embedding
    )
    vocabularies = 1 if tie_embedding else 2
    assert num_parameters(model) == 3 * (12 * 64**2 + 13 * 64) + vocabularies * 256 * 64 + 16 * 64 + 2 * 64


# What is particular to a model


def test_tied_head_is_the_token_embedding() -> None:
    tied = load("transformer_lm").model(tie_embedding=True)
    untied = load("transformer_lm").model()
    assert tied.head.weight is tied.embedding.token.weight
    assert untied.head.weight is not untied.embedding.token.weight


def test_transformer_does_not_look_ahead() -> None:
    model = load("transformer_lm").model(**SMALL["transformer_lm"])
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 10] += 1 - 2 * (changed[:, 10] == 255).long()
    same = (model(tokens) == model(changed)).flatten(2).all(-1).all(0)
    assert same[:10].all() and not same[10:].any()


def test_transformer_dropout_acts_in_training_only() -> None:
    example = load("transformer_lm")
    model = example.model(dropout=0.5)
    tokens = example.example_inputs(2)
    assert not torch.equal(model(tokens), model(tokens))
    assert torch.equal(model.eval()(tokens), model(tokens))


def test_amoebanet_is_a_sequence_of_named_layers() -> None:
    model = meta_model("amoebanet_d", num_layers=18)
    normals = [f"normal_{number}" for number in range(1, 19)]
    names = [name for name, _ in model.named_children()]
    assert names == [
        *("stem", "reduction_1", "reduction_2", *normals[:6], "reduction_3", *normals[6:12]),
        *("reduction_4", *normals[12:], "classifier"),
    ]


def test_amoebanet_cells_hand_on_their_output_and_the_previous_one() -> None:
    example = load("amoebanet_d")
    stem, *cells, _ = example.model(num_layers=3, num_filters=16)
    value = stem(example.example_inputs(2))
    previous, before = value, value
    for cell in cells:
        value = cell(value)
        output, handed_on = value
        assert handed_on is previous
        previous, before = output, previous
    assert previous.shape == (2, 4 * 64, 2, 2) and before.shape == (2, 3 * 64, 2, 2)  # 4 * num_filters, 64 / 32 pixels


def test_amoebanet_factorized_reduction_reads_the_even_and_the_odd_pixels() -> None:
    reduction = load("amoebanet_d").FactorizedReduction(4, 8)
    image = torch.rand(2, 4, 6, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    reduction(image).pow(3).sum().backward()  # batch norm fixes the sums of the first and the second power
    assert image.grad is not None
    row, column = torch.arange(6)[:, None] % 2, torch.arange(6) % 2
    assert torch.equal(image.grad.abs().sum((0, 1)) > 0, row == column)


def test_resnet_has_the_usual_children_and_blocks() -> None:
    model = meta_model("resnet", depth=50)
    names = [name for name, _ in model.named_children()]
    assert names == ["conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4", "avgpool", "fc"]
    assert [len(list(model.get_submodule(f"layer{i}").children())) for i in range(1, 5)] == [3, 4, 6, 3]


def test_unet_answers_at_the_size_of_the_image_whatever_its_depth() -> None:
    example = load("unet")
    images = example.example_inputs(2)
    assert [example.model(depth=depth, width=2)(images).shape for depth in (1, 2, 4)] == [images.shape] * 3


@NEEDS_TRANSFORMERS
def test_gpt2_is_the_class_of_transformers_with_its_own_names() -> None:
    model = load("gpt2_hf").model()
    assert type(model).__name__ == "GPT2LMHeadModel"
    assert "transformer.h.0.attn.c_attn.weight" in dict(model.named_parameters())


def test_gpt2_loss_reads_logits_from_an_attribute_or_a_key() -> None:
    class Output:
        logits = torch.randn(2, 4, 256, generator=torch.Generator().manual_seed(0))

    loss, target = load("gpt2_hf").loss, torch.arange(8).view(2, 4)
    assert loss(Output(), target) == loss({"logits": Output.logits}, target) > 0


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
    ],
)
def test_wrong_setting_is_named_with_what_to_do(
    name: str, function: str, settings: dict[str, int], message: str
) -> None:
    batch_size = () if function == "model" else (4,)
    with pytest.raises(ValueError, match=message):
        getattr(load(name), function)(*batch_size, **settings)


def test_gpt2_without_transformers_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="pip install transformers"):
        load("gpt2_hf").model()
