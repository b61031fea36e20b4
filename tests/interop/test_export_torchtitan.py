"""torchtitan's configuration, read as TOML and applied to a model the way its documentation splits one."""

from __future__ import annotations

import copy
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gplan.core import Plan
from gplan.core.errors import UsageError
from gplan.interop.export.exporters import export
from tests.interop.planned import cut, cuts_of, planned, profiled, shared, transformer, value


def settings(plan: Plan) -> dict[str, Any]:
    return tomllib.loads(export(plan, to="torchtitan").text)


def parts_of(plan: Plan) -> list[list[str]]:
    parts: list[list[str]] = settings(plan)["parallelism"]["module_fqns_per_model_part"]
    return parts


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
    found = settings(plan)["parallelism"]
    assert (found["pipeline_parallel_degree"], found["pipeline_parallel_schedule"]) == (2, "Interleaved1F1B")
    assert [len(part) for part in parts_of(plan)] == [2, 1, 2, 3]
    assert "pipeline_parallel_schedule_csv" not in found


def test_the_stages_of_zb_v_go_there_and_back() -> None:
    found = settings(cut(transformer(5), [2, 3, 5], schedule="zb-v"))["parallelism"]
    assert found["pipeline_parallel_schedule"] == "ZBVZeroBubble"


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
    found = settings(plan)["parallelism"]
    assert found["pipeline_parallel_schedule_csv"] == "gplan.schedule.csv"
    assert found["pipeline_parallel_schedule"] == placement
    assert any("gplan export --to csv --output gplan.schedule.csv" in x for x in export(plan, to="torchtitan").notes)


def test_the_local_batch_is_all_micro_batches() -> None:
    found = settings(cut(transformer(2), [2]))
    assert found["parallelism"]["pipeline_parallel_degree"] == 2
    assert found["parallelism"]["pipeline_parallel_microbatch_size"] == 2
    assert found["training"] == {"local_batch_size": 16}


@pytest.mark.parametrize(("recompute", "mode"), [("never", "none"), ("always", "full")])
def test_recompute_is_the_mode_of_activation_checkpointing(recompute: str, mode: str) -> None:
    plan = cut(transformer(2), [2], recompute=recompute)
    assert settings(plan)["activation_checkpoint"] == {"mode": mode}
    notes = export(plan, to="torchtitan").notes
    assert any("block by block" in note for note in notes) == (recompute == "always")


def test_a_module_called_twice_on_one_stage_is_named_once_and_joined_layers_apart() -> None:
    assert parts_of(planned(["stem..relu", "mix", "relu#2"], ["head"])) == [["stem", "relu", "mix"], ["head"]]


UNEVEN = "custom:0F0 2F0 2B0 0B0 / 1F0 1B0"
REFUSALS = [
    (planned(["stem", "relu"], ["mix", "relu#2"]), "relu is called on stages 0 and 1"),
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
        "custom order has stages on devices 0, 1, 0; torchtitan",
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
        ((*chain, value(None, 2)), "the output of the model's input skips layers"),
    ):
        with pytest.raises(UsageError, match=told):
            export(plan, to="torchtitan", profile=profiled("abc", values=values))
    export(plan, to="torchtitan", profile=profiled("abc", values=chain))


def test_a_weight_may_be_shared_within_a_stage_only() -> None:
    profile = profiled("abc", shared_weights=(shared(0, 1),))
    with pytest.raises(UsageError, match=r"tied\.weight is used on several stages"):
        export(planned(["a"], ["b", "c"]), to="torchtitan", profile=profile)
    export(planned(["a", "b"], ["c"]), to="torchtitan", profile=profile)
