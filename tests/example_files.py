"""The example model files as tests load them: small settings, and models built with or without storage."""

import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor, device, nn

EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL: dict[str, dict[str, int]] = {  # settings small enough to train in a second
    "transformer_lm": {"num_blocks": 2, "width": 32, "num_heads": 2, "sequence_length": 16},
    "amoebanet_d": {"num_layers": 3, "num_filters": 16, "image_size": 64},
    "unet": {"depth": 2, "width": 4, "image_size": 32},
    "resnet": {"width": 8, "image_size": 32},
    "gpt2_hf": {"num_blocks": 2, "width": 32, "num_heads": 2, "sequence_length": 16},
    "bert_hf": {"num_blocks": 2, "width": 32, "feed_forward": 64, "num_heads": 2, "sequence_length": 16},
    "llama_hf": {"num_blocks": 2, "width": 32, "feed_forward": 64, "num_heads": 2, "sequence_length": 16},
    "t5_hf": {
        "num_blocks": 1, "width": 32, "feed_forward": 64, "num_heads": 2, "head_width": 16,
        "sequence_length": 16, "target_length": 8,
    },
    "vit_hf": {"num_blocks": 2, "width": 32, "feed_forward": 64, "num_heads": 2, "image_size": 16},
    "transformer_l": {"num_layers": 2, "width": 32, "feed_forward": 64, "num_heads": 2, "sequence_length": 16},
    "nmt_transformer": {
        "num_layers": 1, "width": 32, "feed_forward": 64, "num_heads": 2, "head_width": 16, "sequence_length": 8,
    },
}  # fmt: skip
HUGGING_FACE = [name for name in SMALL if name.endswith("_hf")]
NEEDS_TRANSFORMERS = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
RUNNABLE = [pytest.param(name, marks=NEEDS_TRANSFORMERS if name in HUGGING_FACE else ()) for name in SMALL]
every_file = pytest.mark.parametrize("name", SMALL)
every_runnable = pytest.mark.parametrize("name", RUNNABLE)
every_hugging_face = pytest.mark.parametrize("name", HUGGING_FACE)


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
    with device("meta"):
        model: nn.Module = load(name).model(**settings)
    return model


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def call(model: nn.Module, inputs: Any) -> Any:
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


def logits(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits
