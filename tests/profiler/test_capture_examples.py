"""The captured examples run the operations and masks of the plain model."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gplan_profiler.capture.capture import capture
from gplan_profiler.capture.chain import call_arguments, flat_tensors
from tests.example_files import NEEDS_TRANSFORMERS, SMALL, apply, every_runnable, load


class Operations(TorchDispatchMode):
    """How often each operation runs, but for those that compute nothing; in place or not is one."""

    silent = frozenset({
        "_local_scalar_dense", "_unsafe_view", "alias", "as_strided", "detach", "expand", "lift_fresh", "permute", "select",
        "slice", "split", "t", "transpose", "unbind", "unsqueeze", "view",
    })  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.found = Counter[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name not in self.silent:
            self.found[name.rstrip("_")] += 1
        return function(*args, **(kwargs or {}))


def example(name: str, *, without: str = "") -> tuple[nn.Module, Any]:
    """A small model of the project's examples and the inputs of its first batch, one of them left out."""
    torch.manual_seed(0)
    module = load(name)
    model, inputs = apply(module.model, **SMALL[name]).train(), apply(module.example_inputs, 2, **SMALL[name])
    return model, {key: x for key, x in inputs.items() if key != without} if isinstance(inputs, dict) else inputs


@every_runnable
def test_stage_runs_the_plain_operations(name: str) -> None:
    model, inputs = example(name, without="attention_mask")  # what a plain run finds in a mask, a trace cannot know
    args, kwargs = call_arguments(inputs)
    chain = capture(model, inputs)
    with Operations() as plain:
        model(*args, **kwargs)
    with Operations() as captured:
        chain.stage(0, len(chain))(*flat_tensors(inputs, what="inputs"))
    assert captured.found == plain.found


@NEEDS_TRANSFORMERS
@pytest.mark.parametrize("name", ["llama_hf", "gpt2_hf"])
def test_no_superfluous_mask_crosses(name: str) -> None:
    chain = capture(*example(name))
    specs = [spec for boundary in range(len(chain) + 1) for spec in chain.specs(boundary)]
    assert all(spec.dtype != torch.bool and len(spec.shape) < 4 for spec in specs)


@NEEDS_TRANSFORMERS
@pytest.mark.parametrize("name", ["llama_hf", "gpt2_hf", "bert_hf", "t5_hf"])
def test_a_mask_that_is_an_input_is_heeded_whatever_its_values(name: str) -> None:
    model, inputs = example(name)
    inputs = inputs if isinstance(inputs, dict) else {"input_ids": inputs}
    ones = torch.ones_like(inputs["input_ids"])
    chain = capture(model, {**inputs, "attention_mask": ones})
    padded = {**inputs, "attention_mask": ones.index_fill(1, torch.arange(12, 16), 0)}
    for given in ({**inputs, "attention_mask": ones}, padded):
        output = chain.model_output(chain.stage(0, len(chain))(*flat_tensors(given, what="inputs")))
        torch.testing.assert_close(output["logits"], model(**given)["logits"])
