"""Split points for torch.distributed.pipelining, given to its own `pipeline()`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Pipe, SplitPoint, pipeline
from torch.testing._internal.distributed.fake_pg import FakeStore

from gplan.core import Plan
from gplan.core.errors import UsageError
from gplan.interop.export.exporters import export
from gplan.simulation.simulator import schedule_of
from gplan_profiler.capture.capture import capture
from tests.example_files import SMALL, apply, load
from tests.interop.planned import cut, planned, profiled, shared, transformer, value

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


class Chain(nn.Module):
    """Four linear layers, the stages of the tests below."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x))))  # type: ignore[no-any-return]


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """This process as rank 0 of two that are not there: what is sent goes nowhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def made_schedule(plan: Plan, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the exported function makes on rank 0, with the exported CSV beside it."""
    monkeypatch.chdir(folder)
    Path("gplan.schedule.csv").write_text(export(plan, to="csv").text)
    names: dict[str, Any] = {}
    exec(compile(export(plan, to="pytorch").text, "exported", "exec"), names)
    pipe = pipeline(Chain(), mb_args=(torch.randn(2, 4),), split_spec=names["split_spec"])
    return names["make_schedule"](pipe, 0, torch.device("cpu"), nn.functional.mse_loss)


OWN = "custom:0F0 2F0 0F1 2B0 2F1 2I1 0B0 0I1 2W1 0W1 / 1F0 3F0 1F1 3B0 3F1 1B0 3B1 1B1"


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize(
    ("schedule", "name", "num_microbatches"),
    [
        ("interleaved-1f1b:2", "ScheduleInterleaved1F1B", 4),
        ("looped-bfs:2", "ScheduleLoopedBFS", 3),
        ("interleaved-1f1b:2", "_PipelineScheduleRuntime", 3),
        (OWN, "_PipelineScheduleRuntime", 2),
    ],
)
def test_the_schedule_that_is_made_has_the_order_and_the_places_of_the_plan(
    schedule: str, name: str, num_microbatches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(["a"], ["b"], ["c"], ["d"], schedule=schedule, num_microbatches=num_microbatches)
    made = made_schedule(plan, tmp_path, monkeypatch)
    assert type(made).__name__ == name
    found = [[str(x) for x in made.pipeline_order[rank] if x is not None] for rank in range(2)]
    assert found == [[str(x) for x in order] for order in schedule_of(plan).orders]
    assert tuple(made.stage_index_to_group_rank[stage] for stage in range(4)) == plan.devices
    assert [x.stage_index for x in made._stages] == [x.index for x in plan.stages_of(0)]


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize(("schedule", "name"), [("1f1b", "Schedule1F1B"), ("gpipe", "ScheduleGPipe")])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_one_stage_a_rank_is_handed_over_alone(
    schedule: str, name: str, reduction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(["a", "b"], ["c", "d"], schedule=schedule, loss_reduction=reduction)
    made = made_schedule(plan, tmp_path, monkeypatch)
    assert (type(made).__name__, made._stage.stage_index, made._n_microbatches) == (name, 0, 8)
    assert made.scale_grads == (reduction == "mean")


def test_the_stages_of_every_rank_are_listed() -> None:
    names: dict[str, Any] = {}
    plan = planned(["a"], ["b"], ["c"], ["d"], schedule="looped-bfs:2")
    exec(compile(export(plan, to="pytorch").text, "exported", "exec"), names)
    assert names["STAGES"] == [[0, 2], [1, 3]]
    assert '# stage 3 on rank 1: ["d"]' in export(plan, to="pytorch").text


def test_schedules_of_several_stages_send_to_the_next_one_only() -> None:
    near, far = value(0, 1), value(0, 1, 3)
    for schedule in ("looped-bfs:2", "interleaved-1f1b:2"):
        plan = planned(["a"], ["b"], ["c"], ["d"], schedule=schedule)
        with pytest.raises(UsageError, match=r"the output of a is read on stage 3, beyond the next; torch's Schedule"):
            export(plan, to="pytorch", profile=profiled("abcd", values=(far,)))
        export(plan, to="pytorch", profile=profiled("abcd", values=(near,)))
    export(planned(["a"], ["b"], ["c"], ["d"]), to="pytorch", profile=profiled("abcd", values=(far,)))


REFUSALS = [
    (planned(["a"], ["b"], ["c"], ["d"], schedule="zb-v"), "stages 1 and 2 are neighbours on device 1 (zb-v)"),
    (planned(["a"], ["b"], schedule="looped-bfs:2"), "stages 0 and 1 are neighbours on device 0 (looped-bfs:2)"),
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


@pytest.mark.parametrize(
    ("cuts", "readers", "refused"),
    [((2,), (0, 1), False), ((2,), (0, 2), True), ((1, 3), (0, 1, 4), True), ((3,), (4,), True)],
)
def test_inputs_are_read_on_the_first_stage_only(
    cuts: tuple[int, ...], readers: tuple[int, ...], refused: bool
) -> None:
    names = transformer(2)[:4]
    plan, profile = cut(names, cuts), profiled(names, values=(value(None, *readers),))
    if not refused:
        assert "split_spec" in export(plan, to="pytorch", profile=profile).text
        return
    with pytest.raises(
        UsageError, match="the model's input is read up to .*; torch.* gives the inputs to the first stage only"
    ):
        export(plan, to="pytorch", profile=profile)
