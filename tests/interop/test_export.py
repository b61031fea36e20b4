"""`gplan export` and what its formats have in common."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import gplan
from gplan.cli import main
from gplan.core import MachineDevice, Plan
from gplan.core.errors import FileError, UsageError
from gplan.files import json_files
from gplan.interop.export.exporters import FORMATS, export
from gplan.interop.export.requirements import stage_comments
from gplan.schedules.custom import read_custom_order
from gplan.schedules.registry import make_schedule, num_stages_of
from gplan.simulation.simulator import schedule_of
from gplan_profiler.capture.capture import capture
from tests.example_files import SMALL, apply, load
from tests.interop.planned import cut, planned, profiled, transformer, value

OTHERS = [name for name in FORMATS if name not in ("csv", "json")]


def suited(to: str, *stages: list[str], **changed: Any) -> Plan:
    """A plan with the schedule that the receiver runs."""
    return planned(*stages, **{"schedule": "gpipe" if to == "torchgpipe" else "1f1b", **changed})


# What all formats share


@pytest.mark.parametrize("to", OTHERS)
def test_a_plan_in_another_order_than_the_model_runs_is_refused(to: str) -> None:
    plan = suited(to, ["embed", "layers.0"], ["layers.1", "head"])
    ran = profiled(["embed", "layers.1", "layers.0", "head"])
    with pytest.raises(UsageError, match=r"puts layers\.0 where the model runs layers\.1"):
        export(plan, to=to, profile=ran)
    export(plan, to=to, profile=profiled(plan.layer_names))


@pytest.mark.parametrize("to", OTHERS)
def test_a_profile_of_other_layers_is_refused(to: str) -> None:
    plan = suited(to, ["embed", "layers.0"], ["layers.1", "head"])
    for other, told in ((["x"], "only the plan has a layer embed"), ([*plan.layer_names, "a"], "only the profile")):
        with pytest.raises(UsageError, match=told):
            export(plan, to=to, profile=profiled(other))


@pytest.mark.parametrize("to", OTHERS)
def test_without_the_profile_a_note_says_what_was_not_checked(to: str) -> None:
    plan = suited(to, ["embed", "layers.0"], ["layers.1", "head"])
    assert any("without the profile" in x for x in export(plan, to=to).notes)
    assert not any("without" in x for x in export(plan, to=to, profile=profiled(plan.layer_names)).notes)


@pytest.mark.parametrize("to", OTHERS)
def test_the_devices_of_a_machine_are_noted_in_the_order_of_the_ranks(to: str) -> None:
    plan = suited(to, ["embed", "layers.0"], ["layers.1", "head"])
    places = [replace(x, machine_device=MachineDevice(name=f"b{1 - x.index}", host="b")) for x in plan.stages]
    notes = export(replace(plan, stages=tuple(places)), to=to).notes
    assert "the ranks are meant for these devices, in this order: b1, b0" in notes


def test_a_device_of_several_stages_is_noted_once() -> None:
    plan = planned(["embed"], ["layers.0"], ["layers.1"], ["head"], schedule="looped-bfs:2")
    places = [replace(x, machine_device=MachineDevice(name=f"b{x.device}", host="b")) for x in plan.stages]
    notes = export(replace(plan, stages=tuple(places)), to="torchtitan").notes
    assert "the ranks are meant for these devices, in this order: b0, b1" in notes


def test_names_of_layers_that_torch_cannot_split_are_no_matter_to_a_csv() -> None:
    assert export(planned(["0"], ["a..b"], granularity="op"), to="csv").notes == ()


def test_a_value_skips_where_it_crosses_a_cut_and_its_maker_is_not_the_layer_before() -> None:
    from gplan.interop.export.requirements import skipping_values

    plan = planned(["a", "b"], ["c", "d"])
    for crossing, found in (
        (value(1, 2, 3), ()),  # handed over by b, and then within stage 1
        (value(0, 1), ()),
        (value(0, 1, 2), ("a",)),
        (value(None, 0, 3), ("the model's input",)),
        (value(0, 4), ("a",)),  # the model's output
    ):
        assert skipping_values(plan, profiled("abcd", values=(crossing,))) == found


def test_a_format_that_is_not_known_names_those_that_are() -> None:
    with pytest.raises(UsageError, match="'nemo' is not known; expected one of torchtitan, megatron, verl"):
        export(planned(["a"]), to="nemo")


# Real models: what each format makes of the names that capture gives

FIT = {
    "transformer_lm": {
        "torchtitan",
        "megatron",
        "verl",
        "nanotron",
        "deepspeed",
        "torchgpipe",
        "pytorch",
        "vllm",
        "sglang",
    },
    "resnet": {"torchtitan", "deepspeed", "torchgpipe", "pytorch"},
    "unet": {"torchtitan", "deepspeed", "torchgpipe", "pytorch"},
}


@pytest.mark.parametrize("name", FIT)
def test_the_examples_go_where_their_layers_can_be_expressed(name: str) -> None:
    file, settings = load(name), SMALL[name]
    model, inputs = apply(file.model, **settings), apply(file.example_inputs, 2, **settings)
    names = capture(model, inputs).names
    found = set()
    for to in OTHERS:
        try:
            export(cut(names, (2,), schedule="gpipe" if to == "torchgpipe" else "1f1b"), to=to)
            found.add(to)
        except UsageError:
            pass
    assert found == FIT[name]


# Plain JSON


def test_json_expresses_every_plan() -> None:
    plan = cut(
        transformer(2),
        [2],
        recompute="selected",
        num_replicas=3,
        granularity="op",
        schedule="zb-h1",
        num_microbatches=5,
    )
    first = replace(plan.stages[0], recompute_layers=("layers.0",), machine_device=MachineDevice(name="b0", host="b"))
    text = export(replace(plan, stages=(first, plan.stages[1])), to="json").text
    found = json.loads(text)
    assert found == {
        "model": "made",
        "granularity": "op",
        "num_devices": 2,
        "num_stages": 2,
        "num_replicas": 3,
        "sharding": "none",
        "schedule": "zb-h1",
        "num_microbatches": 5,
        "microbatch_size": 2,
        "batch_size": 30,
        "recompute": "selected",
        "stages": [
            {
                "index": 0, "rank": 0, "first_layer": 0, "end_layer": 2, "layers": ["tok_embeddings", "layers.0"],
                "recompute_layers": ["layers.0"], "device": {"name": "b0", "host": "b"},
            },
            {
                "index": 1, "rank": 1, "first_layer": 2, "end_layer": 5, "layers": ["layers.1", "norm", "output"],
                "recompute_layers": [], "device": None,
            },
        ],
    }  # fmt: skip


# What devices of several stages are to each format

CHUNKED = {
    "interleaved-1f1b:2": {"torchtitan", "megatron", "verl", "automodel", "pytorch"},
    "looped-bfs:2": {"torchtitan", "automodel", "pytorch"},
    "zb-v": {"torchtitan", "automodel"},
}


@pytest.mark.parametrize("schedule", CHUNKED)
def test_several_stages_on_a_device_go_where_they_can_be_run(schedule: str) -> None:
    plan, found = cut(transformer(5), [2, 3, 5], schedule=schedule), set()
    for to in OTHERS:
        try:
            export(plan, to=to)
            found.add(to)
        except UsageError as error:
            assert schedule.partition(":")[0] in str(error)
    assert found == CHUNKED[schedule]


@pytest.mark.parametrize("to", ["deepspeed", "torchgpipe", "vllm", "sglang"])
def test_a_receiver_with_one_stage_on_a_device_says_so(to: str) -> None:
    plan = cut(transformer(5), [2, 3, 5], schedule="interleaved-1f1b:2")
    with pytest.raises(
        UsageError, match=r"4 stages on 2 devices \(interleaved-1f1b:2\); \w+ holds one stage per device"
    ):
        export(plan, to=to)


@pytest.mark.parametrize("schedule", ["interleaved-1f1b:1", "looped-bfs:1"])
def test_one_chunk_a_device_is_the_schedule_without_chunks(schedule: str) -> None:
    plain = {"interleaved-1f1b:1": "1f1b", "looped-bfs:1": "gpipe"}[schedule]
    for to in OTHERS:
        made = []
        for name in (schedule, plain):
            try:
                made.append(export(cut(transformer(2), [2], schedule=name), to=to).text)
            except UsageError as error:
                made.append(str(error))
        assert made[0] == made[1]


# The order of every device

OWN = "custom:0F0 0F1 2F0 2B0 2F1 2B1 0B1 0I0 0W0 / 1F0 1F1 1B0 1B1"


@pytest.mark.parametrize("schedule", ["gpipe", "eager-1f1b", "interleaved-1f1b:3", "zb-h1", "zb-v", OWN])
def test_the_csv_is_an_order_that_gplan_reads_back(schedule: str, tmp_path: Path) -> None:
    num_stages = num_stages_of(schedule, 2)
    plan = planned(*[[f"l{i}"] for i in range(num_stages)], schedule=schedule, num_microbatches=2)
    (tmp_path / "order.csv").write_text(export(plan, to="csv").text)
    name = read_custom_order(tmp_path / "order.csv")
    assert make_schedule(name, num_devices=2, num_microbatches=2).orders == schedule_of(plan).orders


# The verb


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with a plan."""
    monkeypatch.chdir(tmp_path)
    gplan.save(cut(transformer(2), [2]), "gplan.plan.json")
    return tmp_path


def gplan_exits(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    return int(caught.value.code or 0)


@pytest.mark.parametrize("to", sorted({*FORMATS} - {"torchgpipe"}))
def test_the_text_alone_is_printed_and_the_notes_go_beside_it(
    here: Path, capsys: pytest.CaptureFixture[str], to: str
) -> None:
    assert gplan_exits("export", "--to", to) == 0
    made, captured = export(cut(transformer(2), [2]), to=to), capsys.readouterr()
    assert captured.out == made.text
    assert captured.err == "".join(f"note: {x}\n" for x in made.notes)
    assert [x.name for x in here.iterdir()] == ["gplan.plan.json"]


def test_output_writes_the_text_to_a_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gplan_exits("export", "gplan.plan.json", "--to", "torchtitan", "--output", "to/planned.py") == 0
    assert Path("to/planned.py").read_text() == export(cut(transformer(2), [2]), to="torchtitan").text
    assert capsys.readouterr().out == "wrote to/planned.py\n"


def test_json_holds_format_text_and_notes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gplan_exits("export", "--to", "megatron", "--json") == 0
    captured, made = capsys.readouterr(), export(cut(transformer(2), [2]), to="megatron")
    assert json.loads(captured.out) == {"format": "megatron", "text": made.text, "notes": list(made.notes)}
    assert captured.err == ""


def test_the_profile_that_lies_beside_is_used_if_it_is_of_this_model(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reordered = profiled(["tok_embeddings", "layers.1", "layers.0", "norm", "output"])
    gplan.save(reordered, "gplan.profile.json")
    assert gplan_exits("export", "--to", "torchtitan") == 2
    assert "puts layers.0 where the model runs layers.1" in capsys.readouterr().err
    gplan.save(replace(reordered, model=replace(reordered.model, digest="other")), "gplan.profile.json")
    assert gplan_exits("export", "--to", "torchtitan") == 0
    assert "without the profile" in capsys.readouterr().err
    assert gplan_exits("export", "--to", "torchtitan", "--profile", "gplan.profile.json") == 2


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        ((), 2, "--to"),
        (("--to", "trl"), 2, "'torchtitan', 'megatron'"),
        (("absent.json", "--to", "json"), 3, "absent.json is not there; expected a gplan plan"),
        (("--to", "json", "--profile", "absent.json"), 3, "absent.json is not there; expected a gplan profile"),
        (("--to", "torchgpipe"), 2, "schedule 1f1b; torchgpipe can express gpipe; plan again with --schedule gpipe"),
        (("--to", "json", "--output", "."), 3, "cannot be written"),
    ],
)
def test_a_mistake_is_one_message_with_its_exit_code(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, told: str
) -> None:
    assert gplan_exits("export", *arguments) == code
    captured = capsys.readouterr()
    assert told in captured.err
    assert captured.out == ""


def test_a_default_profile_that_cannot_be_read_is_not_needed(here: Path) -> None:
    (here / "gplan.profile.json").write_text("{")
    assert gplan_exits("export", "--to", "csv") == 0
    assert gplan_exits("export", "--to", "csv", "--profile", "gplan.profile.json") == 3


@pytest.mark.parametrize("to", FORMATS)
def test_no_export_says_that_this_plan_was_checked(to: str) -> None:
    names = transformer(2)
    try:
        made = export(planned(names[:2], names[2:]), to=to)
    except UsageError:
        return
    assert not any(note.startswith("checked") for note in made.notes)


@pytest.mark.parametrize("name", ["a\nimport os", "a\rb", "a\x1b[2J", "a\u2028b"])
def test_names_with_control_characters_are_refused(name: str, tmp_path: Path) -> None:
    for make in (lambda x: planned([x], ["b"]), lambda x: profiled([x, "b"])):
        file = tmp_path / "read.json"
        gplan.save(make("placeholder"), file)
        file.write_text(file.read_text().replace('"placeholder"', json.dumps(name)))
        with pytest.raises(FileError, match="expected a name without control characters"):
            json_files.load(type(make("a")), file)


@pytest.mark.parametrize("name", ["a\nimport os", "a\x85b", "a\u2028b"])
def test_comments_hold_names_on_one_line(name: str) -> None:
    with patch("gplan.core.plan.check_names"):
        plan = planned([name, "c"], ["b", name])
    assert len(stage_comments(plan, what="stage").splitlines()) == 2
