"""Hugging Face models train, evaluate, save and load as the plain model does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gplan
from gplan.core import Plan
from gplan.core.errors import UsageError
from gplan.runtime.pipeline import Pipeline
from gplan.runtime.run.run_options import RunOptions
from gplan_profiler.model.load import ModelFile, model_in_memory
from tests.example_files import EXAMPLES, call
from tests.example_files import SMALL as SMALL_EXAMPLES
from tests.model_files import load_model_file
from tests.runtime.plans import pipeline_for, run_virtually, unmeasured_plan
from tests.runtime.ranks import on_ranks

transformers = pytest.importorskip("transformers")

BATCH_SIZE = 8  # of unmeasured_plan's plans
SEQUENCE_LENGTH = 12


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """As on the ranks."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def small(name: str, **settings: Any) -> ModelFile:
    return load_model_file(str(EXAMPLES / f"{name}.py"), settings={**SMALL_EXAMPLES[name], **settings})


def trained(pipe: Pipeline, file: ModelFile, *, num_steps: int = 3) -> list[float]:
    optimizer, losses = torch.optim.AdamW(pipe.parameters(), lr=1e-3), []
    for inputs, target in islice(file.batches(BATCH_SIZE), num_steps):
        losses.append(float(pipe.step(inputs, target)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def trained_plainly(model: nn.Module, file: ModelFile, *, num_steps: int = 3) -> list[float]:
    optimizer, losses = torch.optim.AdamW(model.train().parameters(), lr=1e-3), []
    for inputs, target in islice(file.batches(BATCH_SIZE), num_steps):
        loss = file.loss(call(model, inputs), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize(
    ("name", "num_ranks", "schedule", "recompute"),
    [("vit_hf", 2, "gpipe", "except-last"), ("t5_hf", 1, "1f1b", "always")],  # one rank: the virtual engine
)
def test_training_equals_plain_model(name: str, num_ranks: int, schedule: str, recompute: str) -> None:
    file = small(name)
    plan = unmeasured_plan(file, num_devices=2, schedule=schedule, recompute=recompute)
    inputs, _ = next(file.batches(BATCH_SIZE))

    def job(_rank: int) -> tuple[list[float], dict[str, Tensor], Any]:
        pipe = gplan.pipeline(file.name, plan)
        return trained(pipe, file), pipe.full_state_dict(), pipe.predict(inputs)

    parts = on_ranks(num_ranks, job)
    (losses, state, _), (same_losses, _, output) = parts[0], parts[-1]
    plain = file.model
    assert losses == same_losses == pytest.approx(trained_plainly(plain, file), rel=1e-5)
    with torch.no_grad():
        expected = call(plain.eval(), inputs)
        torch.testing.assert_close(output.logits, expected.logits, rtol=1e-3, atol=1e-4)
        plain.load_state_dict(state, strict=True)
        torch.testing.assert_close(output.logits, call(plain, inputs).logits)
    assert type(output) is type(expected) and list(output.keys()) == list(expected.keys())


def test_gpt2_dropout_independent_of_plan() -> None:
    file = small("gpt2_hf", dropout=0.3)
    plan, whole = (unmeasured_plan(file, num_devices=k, recompute="always") for k in (2, 1))

    def losses_of(plan: Plan) -> list[float]:
        return trained(gplan.pipeline(file.name, plan), file)

    losses = losses_of(plan)
    assert losses == pytest.approx(losses_of(whole), rel=1e-5)
    assert losses != pytest.approx(trained_plainly(small("gpt2_hf").model, file), rel=1e-4)


# What a model is called with and gives


def language_model(build: Callable[[], nn.Module], inputs: Any) -> ModelFile:
    """A model that computes its loss itself, called by name with `inputs`."""
    torch.manual_seed(0)
    model = build().train()
    target = torch.zeros(len(inputs["input_ids"]))  # what the loss looks at is in the output
    return model_in_memory(
        model,
        inputs=lambda n: {name: x[:n] for name, x in inputs.items()},
        loss=lambda output, _: output.loss,
        batches=lambda n: iter(lambda: ({name: x[:n] for name, x in inputs.items()}, target[:n]), None),
    )


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=SEQUENCE_LENGTH, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=32, d_model=16, d_ff=32, d_kv=8, num_layers=1, num_heads=2, dropout_rate=0.0, use_cache=False,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def padded(num_samples: int = BATCH_SIZE) -> dict[str, Tensor]:
    """Tokens and labels; every second sample is a third as long."""
    tokens = torch.randint(1, 32, (num_samples, SEQUENCE_LENGTH), generator=torch.Generator().manual_seed(0))
    shortest = SEQUENCE_LENGTH // 3
    lengths = torch.tensor([SEQUENCE_LENGTH, shortest]).repeat(num_samples // 2)
    mask = (torch.arange(SEQUENCE_LENGTH) < lengths[:, None]).long()
    labels = tokens.masked_fill(torch.arange(SEQUENCE_LENGTH) >= shortest, -100)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def test_unseen_padding_is_masked() -> None:
    batch = padded()
    file = language_model(llama, {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])})
    plain = copy.deepcopy(file.model)
    pipe = pipeline_for(file, unmeasured_plan(file, num_devices=2))
    found = pipe.step(batch)
    expected = call(plain, batch).loss
    expected.backward()
    assert float(found) == pytest.approx(float(expected.detach()), rel=1e-5)
    gradients = {name: x.grad for name, x in plain.named_parameters()}
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6)


SMALLEST = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": SEQUENCE_LENGTH, "use_cache": False,
}  # fmt: skip
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
EXPERTS = {
    "Mixtral": {"num_key_value_heads": 1, "num_local_experts": 4},
    "DeepseekV3": {
        **LATENT, "num_key_value_heads": 2, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_group": 2,
        "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
    },
    "GptOss": {"num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "Qwen3Moe": {"num_key_value_heads": 1, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
}  # fmt: skip


@pytest.mark.parametrize("name", EXPERTS)
def test_mixture_of_experts(name: str) -> None:
    config = getattr(transformers, f"{name}Config")(**{**SMALLEST, **EXPERTS[name]})
    torch.manual_seed(0)
    batch = {key: padded()[key] for key in ("input_ids", "labels")}
    file = language_model(lambda: transformers.AutoModelForCausalLM.from_config(config), batch)
    plan = unmeasured_plan(file, num_devices=2)
    assert any("depends on routing" in note for note in plan.notes)
    plain = copy.deepcopy(file.model)
    pipe = pipeline_for(file, plan)
    pipe.step(batch)
    call(plain, batch).loss.backward()
    gradients = {x: y.grad for x, y in plain.named_parameters() if y.grad is not None}
    largest = max(float(x.abs().max()) for x in gradients.values())
    found = {x: y.grad for x, y in pipe.named_parameters() if y.grad is not None}
    assert found.keys() == gradients.keys()
    assert all(float((x - gradients[key]).abs().max()) <= 1e-5 * largest for key, x in found.items())


IDIOM = """
import torch
import transformers

TOKENS = torch.arange(64).view(8, 8) % 30

config = transformers.LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
)
torch.manual_seed(0)
model = transformers.AutoModelForCausalLM.from_config(config)
model.gradient_checkpointing_enable()

def batches(batch_size):
    while True:
        yield transformers.BatchEncoding({"input_ids": TOKENS[:batch_size], "labels": TOKENS[:batch_size]})

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
"""


def test_file_without_loss_and_wrapper_code(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(IDIOM)
    file = load_model_file(str(path))
    plan = unmeasured_plan(file, num_devices=2)
    run = run_virtually(file, plan, RunOptions(num_steps=1, check=True))
    assert run.check is not None and run.check.passed and run.check.num_parameters == 21
    tokens = torch.arange(64).view(8, 8) % 30
    batch = {"input_ids": tokens, "labels": tokens}
    again = load_model_file(str(path))
    pipe = gplan.pipeline(again.model, plan, inputs=batch)
    assert float(pipe.step(batch)) == pytest.approx(run.losses[0], rel=1e-6)


# Weights that were saved


@dataclass(frozen=True)
class Saved:
    """A saved T5; its embedding is saved once for three uses."""

    folder: Path
    plan: Plan
    loss: float  # of `padded()`, in evaluation mode
    state: Mapping[str, Tensor]


@pytest.fixture(scope="module")
def torch_s_own_linspace() -> None:
    """torch lists its factories on first use of a default device; from_pretrained replaces one temporarily."""
    with torch.device("meta"):
        torch.empty(0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("t5")
    file = language_model(t5, padded())
    file.model.save_pretrained(folder)  # type: ignore[operator]
    plan = unmeasured_plan(file, num_devices=2)
    with torch.no_grad():
        loss = float(call(file.model.eval(), padded()).loss)
    return Saved(folder, plan, loss, file.model.state_dict())


def test_save_pretrained_weights_by_stage(saved: Saved) -> None:
    def job(_rank: int) -> tuple[float, dict[str, Tensor], set[str]]:
        pipe = gplan.pipeline(
            t5, saved.plan, loss=lambda output, _: output.loss, inputs=padded(2), weights=saved.folder, seed=9
        )
        return float(pipe.eval_step(padded())), pipe.full_state_dict(), {name for name, _ in pipe.named_parameters()}

    (loss, state, first), (_, _, second) = on_ranks(2, job)
    assert loss == pytest.approx(saved.loss, rel=1e-5)
    assert list(state) == list(saved.state) and all(torch.equal(state[key], saved.state[key]) for key in state)
    assert first & second == {"shared.weight"}


@pytest.mark.usefixtures("torch_s_own_linspace")
def test_from_pretrained(saved: Saved) -> None:
    def build() -> nn.Module:
        model = transformers.T5ForConditionalGeneration.from_pretrained(saved.folder)
        model.config.use_cache = False
        return model.train()

    pipe = gplan.pipeline(build, saved.plan, loss=lambda output, _: output.loss, inputs=padded(2), seed=9)
    assert float(pipe.eval_step(padded())) == pytest.approx(saved.loss, rel=1e-5)


def test_lost_rotary_frequencies_refused(tmp_path: Path) -> None:
    file = language_model(llama, padded())
    file.model.save_pretrained(tmp_path)  # type: ignore[operator]
    plan = unmeasured_plan(file, num_devices=2)

    def loss_of(model: nn.Module | Callable[[], nn.Module]) -> float:
        pipe = gplan.pipeline(
            model, plan, loss=lambda output, _: output.loss, inputs=padded(2), weights=tmp_path, seed=9
        )
        return float(pipe.eval_step(padded()))

    with torch.no_grad():
        assert loss_of(llama) == pytest.approx(float(call(file.model.eval(), padded()).loss), rel=1e-5)
    with torch.device("meta"):
        on_meta = llama()
    with pytest.raises(UsageError, match=r"inv_freq lost its values, .*pass the function that builds the model"):
        loss_of(on_meta)
