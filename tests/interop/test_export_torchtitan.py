"""torchtitan's configuration, amended by the exported module and applied to a model the way its documentation splits one."""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import gplan
from gplan.core import Constraints, Plan, Profile, ValueCost
from gplan.core.errors import UsageError
from gplan.interop.export.exporters import export
from tests.interop.planned import cut, cuts_of, planned, profiled, shared, transformer, value


@dataclass
class Parallelism:
    """Of torchtitan's ParallelismConfig: what a plan decides."""

    pipeline_parallel_degree: int = 1
    pipeline_parallel_schedule: str = "1F1B"
    pipeline_parallel_schedule_csv: str | None = ""
    pipeline_parallel_microbatch_size: int = 1
    module_fqns_per_model_part: list[list[str]] | None = None


@dataclass
class Training:
    """Of torchtitan's TrainingConfig."""

    local_batch_size: int = 8
    global_batch_size: int = 64
    disable_cuda_graphs: bool = False


@dataclass
class Config:
    """Of torchtitan's Trainer.Config."""

    parallelism: Parallelism = field(default_factory=Parallelism)
    training: Training = field(default_factory=Training)
    activation_checkpoint: Any = "selective"


def planned_config(plan: Plan) -> Config:
    """What the exported module makes of a configuration."""
    trainer, checkpoints = ModuleType("torchtitan.trainer"), ModuleType("torchtitan.distributed.activation_checkpoint")
    trainer.Trainer = type("Trainer", (), {"Config": Config})  # type: ignore[attr-defined]
    checkpoints.FullAC = type("FullAC", (), {"Config": lambda: "full"})  # type: ignore[attr-defined]
    names: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        for module in (trainer, checkpoints):
            patch.setitem(sys.modules, module.__name__, module)
        for package in ("torchtitan", "torchtitan.distributed"):
            patch.setitem(sys.modules, package, ModuleType(package))
        exec(compile(export(plan, to="torchtitan").text, "exported", "exec"), names)
    made = names["planned"](Config())
    assert isinstance(made, Config)
    assert made.training.disable_cuda_graphs  # torchtitan refuses a pipeline with them
    return made


def parts_of(plan: Plan) -> list[list[str]]:
    return planned_config(plan).parallelism.module_fqns_per_model_part or []


def model_of(num_blocks: int) -> nn.Module:
    model = nn.Module()
    model.tok_embeddings = nn.Embedding(2, 1)
    model.layers = nn.ModuleDict({str(i): nn.Linear(1, 1) for i in range(num_blocks)})
    model.norm = nn.LayerNorm(1)
    model.output = nn.Linear(1, 2)
    return model


def split(model: nn.Module, part: list[str]) -> nn.Module:
    """The model with the modules of one part: entries of a top-level ModuleDict, and children;
    the rest is taken away."""
    kept = copy.deepcopy(model)
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleDict):
            for entry in child:
                if f"{name}.{entry}" not in part:
                    del kept.get_submodule(name)[entry]  # type: ignore[operator]
        elif name not in part:
            setattr(kept, name, None)
    return kept


@given(st.data(), st.integers(1, 12))
def test_every_parameter_is_on_the_stage_that_the_plan_gives_it(data: st.DataObject, num_blocks: int) -> None:
    names = transformer(num_blocks)
    plan = cut(names, data.draw(cuts_of(len(names))))
    model = model_of(num_blocks)
    stages = [split(model, part) for part in parts_of(plan)]
    held = [name for stage in stages for name, _ in stage.named_parameters()]
    assert held == [name for name, _ in model.named_parameters()]
    for stage, kept in zip(plan.stages, stages, strict=True):
        owners = {name.rpartition(".")[0] for name, _ in kept.named_parameters()}
        assert owners == set(stage.layer_names)


def test_the_documented_example_is_written_as_documented() -> None:
    plan = planned(["tok_embeddings", "layers.0"], ["layers.1", "layers.2"], ["norm", "output"])
    assert parts_of(plan) == [["tok_embeddings", "layers.0"], ["layers.1", "layers.2"], ["norm", "output"]]


def test_chunks_are_as_many_parts_on_fewer_ranks() -> None:
    plan = cut(transformer(5), [2, 3, 5], schedule="interleaved-1f1b:2")
    found = planned_config(plan).parallelism
    assert (found.pipeline_parallel_degree, found.pipeline_parallel_schedule) == (2, "Interleaved1F1B")
    assert [len(part) for part in parts_of(plan)] == [2, 1, 2, 3]
    assert not found.pipeline_parallel_schedule_csv


def test_the_stages_of_zb_v_go_there_and_back() -> None:
    found = planned_config(cut(transformer(5), [2, 3, 5], schedule="zb-v")).parallelism
    assert found.pipeline_parallel_schedule == "ZBVZeroBubble"


UNNAMED = [
    (cut(transformer(5), [3], schedule="eager-1f1b"), "PipelineScheduleMulti"),
    (cut(transformer(5), [2, 4], num_microbatches=2), "PipelineScheduleMulti"),
    (cut(transformer(5), [2, 3, 5], schedule="interleaved-1f1b:2", num_microbatches=3), "PipelineScheduleMulti"),
    (cut(transformer(5), [3], schedule="custom:0F0 0B0 / 1F0 1I0 1W0", num_microbatches=1), "PipelineScheduleMulti"),
    (
        cut(transformer(5), [2, 3, 5], schedule="custom:0F0 3F0 3B0 0B0 / 1F0 2F0 2B0 1B0", num_microbatches=1),
        "ZBVZeroBubble",
    ),
]


@pytest.mark.parametrize(("plan", "placement"), UNNAMED)
def test_an_order_without_a_name_is_a_file_and_the_name_places_the_stages(plan: Plan, placement: str) -> None:
    found = planned_config(plan).parallelism
    assert found.pipeline_parallel_schedule_csv == "gplan.schedule.csv"
    assert found.pipeline_parallel_schedule == placement
    assert any("gplan export --to csv --output gplan.schedule.csv" in x for x in export(plan, to="torchtitan").notes)


def test_the_local_batch_is_all_micro_batches() -> None:
    found = planned_config(cut(transformer(2), [2]))
    assert found.parallelism.pipeline_parallel_degree == 2
    assert found.parallelism.pipeline_parallel_microbatch_size == 2
    assert (found.training.local_batch_size, found.training.global_batch_size) == (16, -1)


def test_one_stage_accumulates_its_micro_batches() -> None:
    """Without a pipeline torchtitan runs a local batch at once."""
    found = planned_config(cut(transformer(2), []))
    assert (found.training.local_batch_size, found.training.global_batch_size) == (2, 16)


@pytest.mark.parametrize(("recompute", "mode"), [("never", None), ("always", "full")])
def test_recompute_is_the_mode_of_activation_checkpointing(recompute: str, mode: str | None) -> None:
    plan = cut(transformer(2), [2], recompute=recompute)
    assert planned_config(plan).activation_checkpoint == mode
    notes = export(plan, to="torchtitan").notes
    assert any("block by block" in note for note in notes) == (recompute == "always")


def test_a_module_called_twice_on_one_stage_is_named_once_and_joined_layers_apart() -> None:
    assert parts_of(planned(["stem..relu", "mix", "relu#2"], ["head"])) == [["stem", "relu", "mix"], ["head"]]


UNEVEN = "custom:0F0 2F0 2B0 0B0 / 1F0 1B0"
REFUSALS = [
    (planned(["stem", "relu"], ["mix", "relu#2"]), "relu is called on several stages"),
    (planned(["transformer.wte", "transformer.h.0"], ["lm_head"]), "transformer.h.0 is too deep in the model"),
    (planned(["0"], ["1"]), "layer 0 is a child of an nn.Sequential"),
    (cut(transformer(2), [2], num_replicas=2), "the plan runs 2 replicas; torchtitan runs one pipeline"),
    (cut(transformer(2), [2], recompute="except-last"), "torchtitan can express never or always"),
    (cut(transformer(2), [2], recompute="selected"), "torchtitan can express never or always"),
    (
        cut(transformer(4), [2], schedule="zb-h1", recompute="always"),
        "zb-h1 splits the backward; torchtitan would recompute",
    ),
    (
        cut(transformer(4), [2, 4], schedule=UNEVEN, num_microbatches=1),
        "the plan has stages on devices 0, 1, 0 (custom order)",
    ),
    (cut(transformer(2), [2], granularity="op"), "torchtitan cuts between modules"),
]


@pytest.mark.parametrize(("plan", "told"), REFUSALS, ids=[told for _, told in REFUSALS])
def test_what_torchtitan_cannot_split_or_run_is_refused(plan: Plan, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        export(plan, to="torchtitan")
    assert told in str(caught.value)


def test_what_a_stage_does_not_get_from_its_neighbour_is_refused() -> None:
    plan = planned(["a"], ["b"], ["c"])
    chain = (value(None, 0), value(0, 1), value(1, 2), value(2, 3))
    for values, told in (
        ((value(0, 1, 2), *chain[2:]), "the output of a skips layers"),
        ((*chain, value(None, 2)), "the model's input skips layers"),
    ):
        with pytest.raises(UsageError, match=told):
            export(plan, to="torchtitan", profile=profiled("abc", values=values))
    export(plan, to="torchtitan", profile=profiled("abc", values=chain))
    with pytest.raises(UsageError, match=r"plan again with --for torchtitan, which keeps b\.\.c on one stage$"):
        export(planned("ab", "cd"), to="torchtitan", profile=profiled("abcd", values=(value(0, 1, 2), *chain[2:])))


class Conditioned(nn.Module):
    """Every block reads what is made once from a condition, and returns it with its output as it is or as a copy."""

    def __init__(self, *, copies: bool) -> None:
        super().__init__()
        self.condition = nn.Linear(4, 4)
        self.layers = nn.ModuleList(ConditionedBlock(copies=copies) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        condition = self.condition(x)
        for layer in self.layers:
            x, condition = layer(x, condition)
        return x


class ConditionedBlock(nn.Module):
    def __init__(self, *, copies: bool) -> None:
        super().__init__()
        self.linear, self.copies = nn.Linear(4, 4), copies

    def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x) * condition, condition.clone() if self.copies else condition


def test_advice_for_conditioning_that_skips_layers_applies() -> None:
    # The advice was --keep-together of all blocks. A block that passes the condition on as it is does not mend it, a copy does.
    def made(*, copies: bool) -> tuple[Plan, Profile]:
        given: dict[str, Any] = {"inputs": torch.ones(2, 4), "microbatch_sizes": [2], "granularity": "layer"}
        profile = gplan.profile(Conditioned(copies=copies), **given, device="meta", hardware="cpu")
        constraints = Constraints(cut_after=("layers.1",))
        return gplan.balance(profile, num_devices=2, schedule="1f1b", constraints=constraints), profile

    plan, profile = made(copies=False)
    with pytest.raises(UsageError) as caught:
        export(plan, to="torchtitan", profile=profile)
    assert "let each layer between return a copy of it too (y.clone()), or train with gplan run" in str(caught.value)
    plan, profile = made(copies=True)
    assert export(plan, to="torchtitan", profile=profile).text


def test_a_hugging_face_model_has_the_names_of_the_transformers_backend() -> None:
    names = ["model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.layers.1", "model.norm", "lm_head"]
    mask, rotary = value(0, 2, 3), value(1, 2, 3)
    plan, profile = cut(names, [3]), profiled(names, values=(value(0, 2), value(2, 3), value(3, 4), mask, rotary))
    found = export(plan, to="torchtitan", profile=profile)
    assert (
        '["tok_embeddings", "layers.0", "rotary_emb"],\n    ["layers.1", "norm", "lm_head", "rotary_emb"]' in found.text
    )
    assert any("transformers_modeling_backend" in x for x in found.notes)
    hidden = replace(mask, costs=(ValueCost(microbatch_size=2, num_bytes=4, gradient_bytes=4),))
    with pytest.raises(UsageError, match=r"the output of model\.embed_tokens skips layers"):
        export(plan, to="torchtitan", profile=replace(profile, values=(hidden,)))


def test_a_weight_may_be_shared_within_a_stage_only() -> None:
    profile = profiled("abc", shared_weights=(shared(0, 1),))
    with pytest.raises(UsageError, match=r"tied\.weight is used on several stages"):
        export(planned(["a"], ["b", "c"]), to="torchtitan", profile=profile)
    export(planned(["a", "b"], ["c"]), to="torchtitan", profile=profile)
