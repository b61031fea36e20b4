"""The PipelineModule for DeepSpeed, run over a stand-in that keeps to what its base class documents."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gplan.core import Plan
from gplan.core.errors import UsageError
from gplan.interop.export.exporters import export
from tests.interop.planned import cut, cuts_of, planned, profiled, shared, value


class PipelineModule:
    """Of DeepSpeed's: the order in which its constructor finds the stage of a rank and divides the layers."""

    def __init__(self, layers: list[Any], *, rank: int, num_stages: int, activation_checkpoint_interval: int) -> None:
        self.global_rank = rank
        self._topo = SimpleNamespace(get_coord=lambda rank: SimpleNamespace(pipe=rank), get_dim=lambda _: num_stages)
        self._layer_specs = layers
        self._local_start, self._local_stop = 0, None
        self._partition_layers(method="parameters")
        self.built = layers[self._local_start : self._local_stop]
        self.recomputed = [
            self.built[i : i + activation_checkpoint_interval]
            for i in range(0, len(self.built), activation_checkpoint_interval or len(self.built) + 1)
        ]

    def _partition_layers(self, method: str = "uniform") -> None:
        raise NotImplementedError

    def _set_bounds(self, start: int, stop: int) -> None:
        self._local_start, self._local_stop = start, stop

    def stage_owner(self, layer: int) -> int:
        num_stages = self._topo.get_dim("pipe")
        return next(i for i in range(num_stages) if self.parts[i] <= layer < self.parts[i + 1])

    parts: list[int]


def run_export(plan: Plan) -> dict[str, Any]:
    """What the exported Python defines."""
    names: dict[str, Any] = {}
    package = ModuleType("deepspeed.pipe")
    package.PipelineModule = PipelineModule  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
        patch.setitem(sys.modules, "deepspeed.pipe", package)
        exec(compile(export(plan, to="deepspeed").text, "exported", "exec"), names)
    return names


@given(st.data(), st.integers(1, 20))
def test_every_rank_builds_the_layers_that_the_plan_gives_it(data: st.DataObject, num_layers: int) -> None:
    layers = [f"l{i}" for i in range(num_layers)]
    plan = cut(layers, data.draw(cuts_of(num_layers)) if num_layers > 1 else [])
    found = run_export(plan)
    ranks = [found["PlannedPipelineModule"](layers, rank=i, **found["ARGUMENTS"]) for i in range(plan.num_stages)]
    assert [tuple(x.built) for x in ranks] == [x.layer_names for x in plan.stages]
    for stage in plan.stages:
        for i in range(stage.first_layer, stage.end_layer):
            assert ranks[0].stage_owner(i) == stage.index


def test_parts_are_the_boundaries_of_the_stages() -> None:
    found = run_export(planned(["a", "b"], ["c"], ["d", "e", "f"]))
    assert found["PARTS"] == [0, 2, 3, 6]


def test_the_batch_is_micro_batches_times_accumulation_times_replicas() -> None:
    config = run_export(planned(["a"], ["b"], num_replicas=3))["CONFIG"]
    assert config["train_micro_batch_size_per_gpu"] == 2
    assert config["gradient_accumulation_steps"] == 8
    assert config["train_batch_size"] == 2 * 8 * 3


def test_recompute_always_takes_each_stage_as_one() -> None:
    plan = planned(["a"], ["b", "c", "d"], recompute="always")
    found = run_export(plan)
    last = found["PlannedPipelineModule"](list("abcd"), rank=1, **found["ARGUMENTS"])
    assert last.recomputed == [["b", "c", "d"]]
    assert run_export(planned(["a"], ["b"]))["ARGUMENTS"]["activation_checkpoint_interval"] == 0


def test_layers_that_are_counted_are_listed() -> None:
    # "takes 4 layers" did not tell which.
    found = export(planned(["embed", "layers.0"], ["layers.1", "head"]), to="deepspeed")
    assert '# stage 0: ["embed", "layers.0"]\n# stage 1: ["layers.1", "head"]\nPARTS = [0, 2, 4]' in found.text
    assert "takes 4 layers, those in the comments" in found.notes[0]


def test_skips_and_tied_weights_are_noted_with_what_to_do() -> None:
    profile = profiled("abc", values=(value(0, 1, 2), value(1, 2)), shared_weights=(shared(0, 2),))
    notes = " ".join(export(planned(["a"], ["b"], ["c"]), to="deepspeed", profile=profile).notes)
    assert "what a makes skips layers: the layers between must pass it on in a tuple" in notes
    assert "tied.weight is used on several stages: its layers must be a TiedLayerSpec" in notes
    plain = " ".join(export(planned(["a"], ["b"], ["c"]), to="deepspeed", profile=profiled("abc")).notes)
    assert "skips" not in plain
    assert "Tied" not in plain


REFUSALS = [
    (planned(["a"], ["b"], schedule="gpipe"), "DeepSpeed can express 1f1b; plan again with --schedule 1f1b"),
    (planned(["a"], ["b"], recompute="except-last"), "DeepSpeed can express never or always"),
    (planned(["a"], ["b"], recompute="selected"), "DeepSpeed can express never or always"),
    (planned(["a"], ["b", "a#2"]), "layer a#2 is a second call of a module"),
    (planned(["a"], ["b..c"]), "layer b..c is several modules that cannot be cut apart"),
    (planned(["a"], ["b"], granularity="op"), "DeepSpeed cuts between modules"),
]


@pytest.mark.parametrize(("plan", "told"), REFUSALS, ids=[told for _, told in REFUSALS])
def test_what_deepspeed_cannot_run_is_refused(plan: Plan, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        export(plan, to="deepspeed")
    assert told in str(caught.value)
