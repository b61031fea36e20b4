"""Split points for torch.distributed.pipelining, given to its own `pipeline()`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import Pipe, SplitPoint, pipeline

from gplan.errors import UsageError
from gplan.interop.export import export
from gplan.nouns import Plan
from profiler.capture.model import capture
from tests.example_files import SMALL, apply, load
from tests.interop.planned import cut, planned, profiled, shared, value

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's own


def split_spec(plan: Plan) -> dict[str, SplitPoint]:
    names: dict[str, Any] = {}
    exec(compile(export(plan, to="pytorch").text, "exported", "exec"), names)
    spec: dict[str, SplitPoint] = names["split_spec"]
    return spec


def parameters_by_stage(pipe: Pipe) -> list[set[str]]:
    stages = (pipe.get_stage_module(i) for i in range(pipe.num_stages))
    return [{name for name, _ in stage.named_parameters()} for stage in stages]


def planned_parameters(plan: Plan, model: nn.Module) -> list[set[str]]:
    names = [name for name, _ in model.named_parameters()]
    return [
        {name for name in names for layer in stage.layer_names if name.startswith(f"{layer}.")} for stage in plan.stages
    ]


@pytest.mark.parametrize(("name", "cuts"), [("transformer_lm", (2, 3)), ("unet", (1, 3, 5))])
def test_pipeline_makes_the_stages_of_the_plan(name: str, cuts: tuple[int, ...]) -> None:
    file, settings = load(name), SMALL[name]
    model, inputs = apply(file.model, **settings), apply(file.example_inputs, 2, **settings)
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    plan = cut(capture(model, inputs).names, cuts)
    pipe = pipeline(model, mb_args=args, split_spec=split_spec(plan))
    assert pipe.num_stages == plan.num_stages
    found, expected = parameters_by_stage(pipe), planned_parameters(plan, model)
    assert found == expected
    assert set.union(*found) == {name for name, _ in model.named_parameters()}


class Glued(nn.Module):
    """An operation between two modules: gplan gives it to the module before it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.sin(self.first(x)))  # type: ignore[no-any-return]


def test_operations_between_modules_stay_with_the_stage_before() -> None:
    model, x = Glued(), torch.randn(2, 4)
    plan = cut(capture(model, x).names, (1,))
    pipe = pipeline(model, mb_args=(x,), split_spec=split_spec(plan))
    torch.testing.assert_close(pipe.get_stage_module(0)(x), torch.sin(model.first(x)))


def test_one_stage_has_no_split_points() -> None:
    assert split_spec(planned(["a", "b"])) == {}


def test_joined_layers_begin_with_their_first_module() -> None:
    assert list(split_spec(planned(["a"], ["b..c", "d"], ['e"']))) == ["b", 'e"']


@pytest.mark.parametrize(("schedule", "name"), [("1f1b", "Schedule1F1B"), ("gpipe", "ScheduleGPipe")])
def test_the_notes_name_the_schedule_and_the_micro_batches(schedule: str, name: str) -> None:
    notes = " ".join(export(planned(["a"], ["b"], schedule=schedule), to="pytorch").notes)
    assert f"{name}(pipe.build_stage(rank, device), n_microbatches=8" in notes
    assert hasattr(torch.distributed.pipelining, name)


REFUSALS = [
    (planned(["a", "relu"], ["relu#2", "b"]), "begins with a call of relu, which is called 2 times"),
    (planned(["a"], ["relu", "b", "relu#2"]), "begins with a call of relu, which is called 2 times"),
    (planned(["a"], ["b"], num_replicas=2), "torch.distributed.pipelining runs one pipeline"),
    (planned(["a"], ["b"], recompute="always"), "torch.distributed.pipelining can express never"),
    (planned(["a"], ["b"], recompute="selected"), "torch.distributed.pipelining can express never"),
    (planned(["a"], ["b"], granularity="op"), "torch.distributed.pipelining cuts between modules"),
]


@pytest.mark.parametrize(("plan", "told"), REFUSALS, ids=[told for _, told in REFUSALS])
def test_what_split_points_cannot_say_is_refused(plan: Plan, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        export(plan, to="pytorch")
    assert told in str(caught.value)


def test_a_module_called_twice_within_a_stage_is_no_matter() -> None:
    assert list(split_spec(planned(["relu", "a", "relu#2"], ["b"]))) == ["b"]


def test_skips_are_sent_on_and_torn_weights_refused() -> None:
    plan = planned(["a"], ["b"], ["c"])
    export(plan, to="pytorch", profile=profiled("abc", values=(value(0, 1, 2), value(1, 2))))
    with pytest.raises(UsageError, match=r"tied\.weight is used on several stages"):
        export(plan, to="pytorch", profile=profiled("abc", shared_weights=(shared(0, 2),)))
