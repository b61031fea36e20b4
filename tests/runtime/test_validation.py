"""Plans that cannot run are refused before anything starts; a plan for another machine runs with a note."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import gplan
from gplan.cli import main
from gplan.core import Device, Link, Machine, MachineDevice, Plan
from gplan.core.errors import FileError, GplanError, UsageError
from gplan.runtime.pipeline import own_device
from gplan.runtime.run.run_options import RunOptions
from gplan.runtime.validation import check_fits_here, check_hosts, check_runnable, notes_on_machine
from tests.made import FREE_LINK, make_profile
from tests.runtime.plans import plan_for, recomputing, run_virtually, small_example

MADE = make_profile([1.0, 2.0, 3.0, 4.0], weight_bytes=4)


def planned(**options: Any) -> Plan:
    return gplan.balance(MADE, num_devices=2, num_microbatches=4, **options)


def on_places(*places: MachineDevice) -> Plan:
    return planned(machine=Machine(devices=places, within=FREE_LINK, between=Link(latency_s=0.1, bytes_per_s=1e9)))


@pytest.mark.parametrize(
    ("plan", "kind", "text"),
    [
        (
            gplan.balance(make_profile([1.0, 2.0], weight_bytes=2**50), num_devices=2, num_microbatches=4),
            UsageError,
            "2 stages need .* PiB|TiB together, this host has .* left: run it on more hosts",
        ),
        (replace(planned(), device=Device(name="x", kind="given")), UsageError, "made from made, another planner's"),
        (replace(recomputing(planned(), ["c"]), recompute="never"), FileError, "stage [01] names layers .*'never'"),
        (
            replace(planned(), schedule="zb-v"),
            FileError,
            "2 stages; expected 4 for zb-v.* balance again with --schedule",
        ),
        (replace(planned(), schedule="nemo"), FileError, "'nemo' is not known"),
    ],
)
@pytest.mark.parametrize("engine", ["torch", "virtual"])
def test_unrunnable_plans_refused(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, kind: type[GplanError], text: str, engine: Any
) -> None:
    monkeypatch.setattr(
        "gplan.runtime.run.launch.run_local_processes", lambda *_, **__: pytest.fail("processes started")
    )
    monkeypatch.setattr(
        "gplan_profiler.model.load.OpenedFile.load", lambda *_, **__: pytest.fail("the model was loaded")
    )
    with pytest.raises(kind, match=text):
        gplan.run(plan, engine=engine)


@pytest.mark.parametrize(
    ("engine", "needed"), [("torch", 2 * (16 + 2 * 16 + 4 * 40)), ("virtual", 16 + 2 * 16 + 4 * 40)]
)
def test_check_says_before_it_starts_that_the_plain_model_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, engine: Any, needed: int
) -> None:
    """Four layers of 4 bytes of weights and gradients, which keep 10 bytes for each of four micro-batches."""
    plan = gplan.balance(
        make_profile([1.0] * 4, weight_bytes=4, stash_bytes=10), num_devices=2, num_microbatches=4, schedule="1f1b"
    )
    monkeypatch.setattr("gplan.runtime.validation.available_bytes", lambda: needed - 1)
    with pytest.raises(UsageError, match=rf"--check needs {needed} B, .* has {needed - 1} B left: run without --check"):
        gplan.run(plan, model="model.py", engine=engine, check=True)
    check_fits_here(plan, num_copies=1)
    monkeypatch.setattr("gplan.runtime.validation.available_bytes", lambda: needed)
    check_fits_here(plan, num_copies=1, num_checking=2 if engine == "torch" else 1)


def test_stages_on_gpus_need_no_memory_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(planned(), device=Device(name="NVIDIA H100", kind="cuda"))
    monkeypatch.setattr("gplan.runtime.validation.available_bytes", lambda: 0)
    with pytest.raises(UsageError, match="need .* together"):
        check_fits_here(plan, num_copies=1)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    check_fits_here(plan, num_copies=1)
    assert notes_on_machine(plan) == ()


@pytest.mark.parametrize("engine", ["torch", "virtual"])
def test_loss_beside_model_file_refused(engine: Any) -> None:
    loss = nn.Sequential()
    assert not loss
    with pytest.raises(UsageError, match=r"loss was given beside the model file model.py; define it in the file"):
        gplan.run(planned(), model="model.py", engine=engine, loss=loss)


def test_duplicate_layer_refused() -> None:
    plan = planned()
    twice = replace(plan.stages[1], layer_names=("a",) * plan.stages[1].num_layers)
    with pytest.raises(FileError, match=r"layer a [23] times; expected every layer once"):
        check_runnable(replace(plan, stages=(plan.stages[0], twice)))


def test_no_note_on_same_machine() -> None:
    for plan in (planned(), recomputing(planned(), "ac"), on_places(*(MachineDevice(name=x, host="a") for x in "xy"))):
        check_runnable(plan)
        assert notes_on_machine(plan) == ()


def test_note_on_another_machine() -> None:
    fast, far = MachineDevice(name="x", host="a", speed=2.0), MachineDevice(name="y", host="b")
    (note,) = notes_on_machine(on_places(fast, far))
    assert "x (host a, speed 2), y (host b, speed 1)" in note or "y (host b, speed 1), x (host a, speed 2)" in note
    (note,) = notes_on_machine(on_places(replace(fast, speed=1.0), far))
    assert "host b" in note
    (note,) = notes_on_machine(replace(planned(), device=Device(name="NVIDIA H100", kind="cuda")))
    assert "NVIDIA H100 (cuda)" in note


def test_run_with_placements_has_note() -> None:
    file = small_example("transformer_lm")
    places = (MachineDevice(name="x", host="a", speed=2.0), MachineDevice(name="y", host="a"))
    plan = plan_for(file, num_devices=2, machine=Machine(devices=places, within=FREE_LINK, between=FREE_LINK))
    run = run_virtually(file, plan, RunOptions(num_steps=1, check=True))
    assert run.check is not None and run.check.passed, run.check
    assert any("another machine" in note and "speed 2" in note for note in run.notes)


def unknown_layer(content: dict[str, Any]) -> None:
    content["recompute"] = "selected"
    content["stages"][1]["recompute_layers"] = ["z"]


def layer_twice(content: dict[str, Any]) -> None:
    content["stages"][0]["layer_names"][0] = content["stages"][1]["layer_names"][0]


def selects_without_saying(content: dict[str, Any]) -> None:
    content["stages"][0]["recompute_layers"] = ["a"]


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (unknown_layer, "stage 1 recomputes z, which is not one of its layers"),
        (layer_twice, "2 times; expected every layer once"),
        (selects_without_saying, "expected 'selected'"),
    ],
)
def test_edited_plan_file_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], edit: Callable[[dict[str, Any]], None], text: str
) -> None:
    path = tmp_path / "plan.json"
    gplan.save(planned(), path)
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))
    with pytest.raises(SystemExit) as caught:
        main(["run", "--plan", str(path), "--output", str(tmp_path / "run.json")])
    assert caught.value.code == 3
    message = " ".join(capsys.readouterr().err.split())
    assert text in message
    assert "Traceback" not in message


@pytest.mark.parametrize(
    ("device", "rank", "text"),
    [
        ("cuda:1", "0", "'cuda:1' does not exist; this host has 1 GPU, numbered from 0: choose one"),
        ("cuda", "1", "local rank 1 has no GPU of its own; this host has 1 GPU: start fewer .*--engine virtual"),
    ],
)
def test_gpu_that_is_not_there(device: str, rank: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("gplan.runtime.pipeline.local_place", lambda: (int(rank), 2))
    with pytest.raises(UsageError, match=text):
        own_device(planned(), device)


@pytest.mark.parametrize(
    ("engine", "num_started", "told"),
    [
        ("virtual", 2, "torchrun started 2: run it without torchrun, or with --engine torch"),
        ("torch", 1, "torchrun started 1 process, the plan needs 2: use --nproc-per-node 2"),
    ],
)
def test_torchrun_with_another_engine_is_refused(
    monkeypatch: pytest.MonkeyPatch, engine: Any, num_started: int, told: str
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "made")
    monkeypatch.setenv("WORLD_SIZE", str(num_started))
    with pytest.raises(UsageError, match=told):
        gplan.run(planned(), model="model.py", engine=engine)
    with pytest.raises(UsageError, match="start it without torchrun"):
        gplan.verify(planned(), MADE, model="model.py", engine=engine)


def test_too_few_processes_for_a_plan_of_hosts_are_no_index_error() -> None:
    places = tuple(MachineDevice(name=f"a:{i}", host="a") for i in range(2))
    check_hosts(on_places(*places), ["a"])


def test_one_process_holds_one_copy_of_the_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(planned(), num_replicas=4)
    needed = sum(stage.memory.peak_bytes for stage in plan.stages)
    monkeypatch.setattr("gplan.runtime.validation.available_bytes", lambda: needed)
    check_fits_here(plan, num_copies=1)
    with pytest.raises(UsageError, match=f"the plan's 8 stages need {4 * needed} B together"):
        check_fits_here(plan, num_copies=4)
