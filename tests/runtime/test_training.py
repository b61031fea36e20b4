"""Training with a plan equals training the plain model: losses and gradients of every example, both engines."""

from __future__ import annotations

import math
import random
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gplan
from gplan.core import ActionKind, Constraints, Link, Plan, Run
from gplan.core.errors import FileError, ModelError, RunError, UsageError
from gplan.reporting.text.run import check_text, whole_batch_text
from gplan.runtime.run.launch import run_virtual_engine
from gplan.runtime.run.loop import BatchStream
from gplan.runtime.run.reference import Reference, gradient_check, gradient_errors, plain_reference
from gplan.runtime.run.run_options import RunOptions
from gplan_profiler.host.host_info import device_share
from tests.model_files import load_model_file
from tests.runtime.forked import run_forked
from tests.runtime.plans import SMALL, plain_losses, plan_for, run_virtually, small_example, source_for, unmeasured_plan

STEPS = 4


def assert_trained_as_plain(run: Run, name: str) -> None:
    assert run.check is not None
    assert run.check.passed, run.check
    assert run.check.num_parameters > 0
    assert run.losses == pytest.approx(losses_of_plain(name, run.plan.schedule), rel=1e-5)


@cache
def losses_of_plain(name: str, schedule: str, **settings: Any) -> tuple[float, ...]:
    """Losses of an example without a pipeline, gradients summed in the schedule's order."""
    file = small_example(name, **settings)
    plan = unmeasured_plan(file, num_devices=1, schedule=schedule)
    with device_share(1):  # as the engines do: batch norm over a handful of values makes rounding large
        return tuple(plain_losses(file, plan, num_steps=STEPS))


@pytest.mark.parametrize(
    ("name", "schedule", "recompute"),
    [
        *((name, "1f1b", "except-last") for name in sorted({*SMALL} - {"amoebanet_d"})),  # on two ranks below
        *((name, "gpipe", "always") for name in ("resnet", "transformer_lm", "unet")),
    ],
)
def test_virtual_engine_equals_plain_model(name: str, schedule: str, recompute: str) -> None:
    if name == "gpt2_hf":
        pytest.importorskip("transformers")
    file = small_example(name)
    plan = plan_for(file, num_devices=4, schedule=schedule, recompute=recompute)
    run = run_virtually(file, plan, RunOptions(num_steps=STEPS, check=True))
    assert_trained_as_plain(run, name)
    assert run.peak_bytes == pytest.approx(plan.device_peak_bytes, rel=0.08)


@pytest.mark.parametrize(
    ("name", "schedule", "recompute", "num_devices"),
    [
        ("transformer_lm", "gpipe", "except-last", 2),
        ("gpt2_hf", "1f1b", "always", 2),
        ("resnet", "gpipe", "always", 2),
        ("unet", "1f1b", "never", 3),
        ("amoebanet_d", "1f1b", "except-last", 2),
    ],
)
def test_torch_engine_equals_plain_model(name: str, schedule: str, recompute: str, num_devices: int) -> None:
    if name == "gpt2_hf":
        pytest.importorskip("transformers")
    file = small_example(name)
    plan = plan_for(file, num_devices=num_devices, schedule=schedule, recompute=recompute)
    run = run_forked(file.name, plan, RunOptions(num_steps=STEPS, check=True), settings=SMALL[name])
    assert_trained_as_plain(run, name)
    assert run.engine == "torch"
    assert {span.device for span in run.timeline.spans} == set(range(num_devices))
    kinds = {span.action.kind for span in run.timeline.spans}
    assert kinds == {ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.OPTIMIZER}
    assert run.peak_bytes == pytest.approx(plan.device_peak_bytes, rel=0.08)  # small tensors are rounded up


def test_peak_memory_of_one_step_run() -> None:
    file = small_example("unet")
    plan = plan_for(file, num_devices=2)
    first, later = (run_virtually(file, plan, RunOptions(num_steps=n)).peak_bytes for n in (1, 5))
    assert first == pytest.approx(later, rel=0.12)  # the optimizer has no state yet


@pytest.mark.parametrize(("schedule", "recompute"), [("gpipe", "always"), ("1f1b", "never")])
def test_peak_memory_as_predicted(schedule: str, recompute: str) -> None:
    """With the torch engine; the allocator rounds small tensors up."""
    file = small_example("transformer_lm", width=64, sequence_length=64)
    plan = plan_for(file, num_devices=2, num_microbatches=4, schedule=schedule, recompute=recompute)
    settings = {**SMALL["transformer_lm"], "width": 64, "sequence_length": 64}
    run = run_forked(file.name, plan, RunOptions(num_steps=STEPS), settings=settings)
    errors = [stage.memory.peak_bytes / found - 1 for stage, found in zip(plan.stages, run.peak_bytes, strict=True)]
    assert errors == pytest.approx([0, 0], abs=0.02), errors


@pytest.mark.parametrize(
    ("cut_after", "schedule", "recompute"),
    [(["bottleneck"], "gpipe", "always"), (["encoder.1", "bottleneck", "decoder.1"], "1f1b", "never")],
)
def test_long_skips_are_held_as_predicted(cut_after: list[str], schedule: str, recompute: str) -> None:
    """Skips occupy receive buffers of the stages they pass; their gradients wait where they were made."""
    file, num_devices = small_example("unet", depth=3, width=8, image_size=64), len(cut_after) + 1
    constraints = Constraints(cut_after=tuple(cut_after))  # wherever the times of the day would have it cut
    plan = plan_for(file, num_devices=num_devices, schedule=schedule, recompute=recompute, constraints=constraints)
    run = run_virtually(file, plan, RunOptions(num_steps=STEPS))
    errors = [stage.memory.peak_bytes / found - 1 for stage, found in zip(plan.stages, run.peak_bytes, strict=True)]
    assert errors == pytest.approx([0] * num_devices, abs=0.03), errors


def test_concatenated_skip_copies_its_gradient() -> None:
    """The last layer of the middle stage concatenates a skip from the first: its part of the gradient is copied."""
    file = small_example("unet", depth=3, width=8, image_size=64)
    constraints = Constraints(cut_after=("encoder.0", "upsample.2"))
    plan = plan_for(file, num_devices=3, schedule="1f1b", constraints=constraints)
    run = run_virtually(file, plan, RunOptions(num_steps=STEPS))
    assert plan.stages[1].memory.peak_bytes == pytest.approx(run.peak_bytes[1], rel=0.005)


def batches_of_64(size: int) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield torch.randn(size, 64), torch.randn(size, 64)


def test_layer_that_returns_its_input_costs_no_memory() -> None:
    """The stage of a dropout that is switched off sends its receive buffer."""

    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.dropout, self.last = nn.Linear(64, 64), nn.Dropout(0.0), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.last(self.dropout(self.first(x)))
            return y

    model = Dropping()
    training: dict[str, Any] = {
        "loss": nn.functional.mse_loss, "optimizer": torch.optim.SGD, "batches": batches_of_64
    }  # fmt: skip
    profile = gplan.profile(
        model, inputs=lambda size: torch.randn(size, 64), microbatch_sizes=[64], budget_s=0.01, contention=0,
        link=Link(latency_s=0.0, bytes_per_s=1e9), **training,
    )  # fmt: skip
    assert [x.view_of for x in profile.values] == [None, None, 1, None]
    for recompute in ("never", "always"):
        plan = gplan.balance(profile, num_devices=3, num_microbatches=4, recompute=recompute)
        run = gplan.run(plan, model=model, engine="virtual", num_steps=2, **training)
        assert plan.device_peak_bytes[1] == pytest.approx(run.peak_bytes[1], abs=17_000)  # of 4 x 16384 sent bytes


def test_tied_embedding_over_two_processes() -> None:
    file = small_example("transformer_lm", tie_embedding=True)
    plan = unmeasured_plan(file, num_devices=2)
    settings = {**SMALL["transformer_lm"], "tie_embedding": True}
    run = run_forked(file.name, plan, RunOptions(num_steps=STEPS, check=True), settings=settings)
    assert run.check is not None and run.check.passed, run.check
    assert run.losses == pytest.approx(
        losses_of_plain("transformer_lm", run.plan.schedule, tie_embedding=True), rel=1e-5
    )


def test_batch_norm_counts_minibatches_once() -> None:
    file = small_example("resnet")
    plan = unmeasured_plan(file, num_devices=3, recompute="always")
    before = {name: x.clone() for name, x in file.model.named_buffers()}
    run_virtually(file, plan, RunOptions(num_steps=2))
    counts = {name: int(x - before[name]) for name, x in file.model.named_buffers() if name.endswith("batches_tracked")}
    assert set(counts.values()) == {2}


def test_averages_count_as_update() -> None:
    file = small_example("resnet")
    plan = unmeasured_plan(file, num_devices=3, schedule="looped-bfs:2")
    pipe = gplan.pipeline(file.model, plan, loss=file.loss)
    inputs, targets = next(iter(file.batches(plan.batch_size)))
    pipe.step(inputs, targets)
    actions = [x.action for x in pipe.runner.engine.recorder.take()]
    assert [str(x) for x in actions if x.kind is ActionKind.OPTIMIZER] == ["0O0", "1O0", "2O0"]


def test_virtual_timeline_uses_plan_link() -> None:
    file = small_example("transformer_lm")
    plan = unmeasured_plan(file, num_devices=2)
    run = run_virtually(file, plan, RunOptions(num_steps=2))
    first = {span.action: span for span in run.timeline.spans}
    for transfer in run.timeline.transfers:
        assert transfer.end_s - transfer.start_s == pytest.approx(plan.link.transfer_s(transfer.num_bytes))
        assert transfer.start_s == pytest.approx(first[transfer.action].end_s)


def test_plan_of_another_model_refused() -> None:
    plan = unmeasured_plan(small_example("transformer_lm"), num_devices=2)
    with pytest.raises(
        FileError, match=r"with 6 layers \(embedding to head\); .*unet.py has \d+ layers \(encoder.0 to head\)"
    ):
        run_virtually(small_example("unet"), plan, RunOptions(num_steps=1))
    with pytest.raises(FileError, match="other parameters"):
        run_virtually(small_example("transformer_lm", width=16), plan, RunOptions(num_steps=1))


def test_check_with_dropout_refused() -> None:
    file = small_example("transformer_lm", dropout=0.5)
    plan = unmeasured_plan(file, num_devices=2)
    with pytest.raises(UsageError, match="draws random numbers.*--set dropout=0"):
        run_virtually(file, plan, RunOptions(num_steps=1, check=True))
    assert len(run_virtually(file, plan, RunOptions(num_steps=2)).losses) == 2


FAILING = """
import torch
from torch import nn

class Bomb(nn.Module):
    def forward(self, x):
        {body}
        return x

def model():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Bomb(), nn.Linear(4, 4))

def loss(output, target):
    return ((output - target) ** 2).mean()

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.01)

def batches(batch_size):
    while True:
        yield torch.randn(batch_size, 4), torch.randn(batch_size, 4)
"""


def failing_file(tmp_path: Path, body: str) -> tuple[str, Plan]:
    """A model file with a layer that does `body`, and a plan made without it."""
    path = tmp_path / "bomb.py"
    path.write_text(FAILING.format(body="pass"))
    plan = unmeasured_plan(load_model_file(str(path)), num_devices=2)
    path.write_text(FAILING.format(body=body))
    return str(path), replace(plan, model=replace(plan.model, file_digest=""))


def test_exception_in_a_stage(tmp_path: Path) -> None:
    body = (  # in the fourth call of a process: not while it is captured
        f"import os, pathlib; path = pathlib.Path({str(tmp_path)!r}) / str(os.getpid()); "
        "path.write_text((path.read_text() if path.exists() else '') + '.'); 1 / (path.stat().st_size < 4)"
    )
    reference, plan = failing_file(tmp_path, body)
    with pytest.raises(RunError, match=r"rank \d: .*division by zero"):
        run_forked(reference, plan, RunOptions(num_steps=2, timeout_s=60.0))


def test_killed_process_ends_run(tmp_path: Path) -> None:
    body = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    reference, plan = failing_file(tmp_path, body)
    with pytest.raises(RunError, match=r"rank \d was ended by SIGKILL"):
        run_forked(reference, plan, RunOptions(num_steps=2, timeout_s=60.0))


def test_hanging_stage_times_out(tmp_path: Path) -> None:
    reference, plan = failing_file(tmp_path, "import time; time.sleep(1000)")
    with pytest.raises(RunError, match="for 3 s.*hangs"):
        run_forked(reference, plan, RunOptions(num_steps=2, timeout_s=3.0))


def test_model_in_memory_needs_virtual_engine() -> None:
    file = small_example("unet")
    plan = unmeasured_plan(file, num_devices=2)
    with pytest.raises(UsageError, match="loads the model from a file"):
        gplan.run(plan, model=nn.Linear(2, 2))
    given = {name: file.functions[name] for name in ("loss", "optimizer", "batches")}
    assert len(gplan.run(plan, model=file.model, engine="virtual", num_steps=2, **given).losses) == 2


def test_a_loss_that_is_not_finite_ends_the_run() -> None:
    file = small_example("transformer_lm")
    plan = unmeasured_plan(file, num_devices=2)
    file.functions["loss"] = lambda output, _: output.sum() * math.nan  # type: ignore[index]
    with pytest.raises(
        RunError, match="the loss is nan in step 1, not finite: the output of every layer is; see the loss"
    ):
        run_virtually(file, plan, RunOptions(num_steps=2))


def test_random_batches_equal_on_all_ranks() -> None:
    file = small_example("transformer_lm")
    seen = []
    for rank in range(2):
        file.functions["batches"] = lambda n: iter(  # type: ignore[index]
            lambda: (torch.randint(0, 9, (n, 16)) + random.randrange(100) + np.random.randint(100), torch.rand(n)), None
        )
        data = BatchStream(file, 8, seed=3)
        torch.manual_seed(rank)
        random.seed(rank)
        np.random.seed(rank)
        seen.append([data.take()[0] for _ in range(3)])
    assert all(torch.equal(x, y) for x, y in zip(*seen, strict=True))
    assert not torch.equal(seen[0][0], seen[0][1])


def test_nan_gradient_fails_check() -> None:
    epsilon = torch.finfo(torch.float32).eps
    plain = Reference(loss=1.0, gradients={x: torch.ones(2) for x in "abc"}, epsilon=epsilon, num_microbatches=1)
    found = {"a": torch.ones(2), "b": torch.tensor([1.0, math.nan]), "c": torch.ones(2)}
    check = gradient_check(plain, gradient_errors(plain.gradients, found), loss=1.0)
    assert (check.passed, check.worst_parameter) == (False, "b")
    assert gradient_check(plain, gradient_errors(plain.gradients, {"a": torch.ones(2)}), loss=1.0).passed is False


def test_the_check_tells_how_far_a_loss_with_class_weights_is_from_the_whole_batch() -> None:
    file = small_example("transformer_lm")
    plan = unmeasured_plan(file, num_devices=2)

    def weighted(output: Tensor, target: Tensor) -> Tensor:
        weights = torch.linspace(0.1, 10.0, output.shape[-1])
        return torch.nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), weight=weights)

    file.functions["loss"] = weighted  # type: ignore[index]
    inputs, target = BatchStream(file, plan.batch_size, seed=0).peek()
    plain = float(file.loss(file.forward(inputs), target).detach())
    run = run_virtually(file, plan, RunOptions(num_steps=1, check=True))
    assert run.check is not None and run.check.passed
    whole = run.check.whole_batch
    assert whole is not None and whole.loss == pytest.approx(plain, rel=1e-6)
    assert whole.loss != pytest.approx(run.check.loss, rel=1e-4) and whole.max_relative_error > 0.01
    text = check_text(run.check)
    assert text.startswith("equal to the plain model's micro-batch by micro-batch: ")
    assert "because of a loss or buffers that depend on how the mini-batch is divided" in whole_batch_text(whole)
    assert "a contrastive loss takes its negatives from the micro-batch only" in whole_batch_text(whole)


def test_a_sum_of_rounded_gradients_is_no_loss_that_depends_on_the_division(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gplan.runtime.run.reference.TOLERANCE", 1e-12)  # less than what rounding does
    file = small_example("transformer_lm")
    plan = unmeasured_plan(file, num_devices=2)
    inputs, target = BatchStream(file, plan.batch_size, seed=0).peek()
    whole = plain_reference(file, plan, inputs, target).whole_batch
    assert whole is not None and 0.0 < whole.max_relative_error < 1e-3
    assert whole.reason == "rounding, as the loss is the same"


def test_the_check_runs_the_whole_batch_where_it_is_the_same() -> None:
    file = small_example("transformer_lm")
    run = run_virtually(file, unmeasured_plan(file, num_devices=2), RunOptions(num_steps=1, check=True))
    assert run.check is not None and run.check.whole_batch is None
    assert check_text(run.check).startswith("equal to the plain model's: ")


def test_a_model_file_that_was_changed_after_its_profile_is_noted(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(TINY)
    plan = unmeasured_plan(load_model_file(str(path)), num_devices=2)
    unchanged = run_virtually(load_model_file(str(path)), plan, RunOptions(num_steps=1))
    assert not any("changed after it was profiled" in note for note in unchanged.notes)
    path.write_text(TINY.replace("return nn.functional.mse_loss", "return 2 * nn.functional.mse_loss"))
    with pytest.warns(UserWarning, match="model.py changed after it was profiled"):
        run = run_virtually(load_model_file(str(path)), plan, RunOptions(num_steps=1))
    assert any("changed after it was profiled" in note for note in run.notes)


def test_a_changed_plan_is_said_before_training() -> None:
    file, said = small_example("transformer_lm"), list[str]()
    plan = replace(unmeasured_plan(file, num_devices=2), num_microbatches=1)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_: said.append(str(message))
        run = run_virtual_engine(
            source_for(file, 0), plan, RunOptions(num_steps=1), report=lambda *_: said.append("a step")
        )
    notes = [x for x in said if x.startswith("the plan was changed after it was made")]
    assert said.index(notes[0]) < said.index("a step") and notes == [x for x in run.notes if x in notes]


TINY = """
import torch
from torch import nn


def model():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def loss(output, target):
    return nn.functional.mse_loss(output, target)


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def batches(batch_size):
    while True:
        yield torch.ones(batch_size, 8), torch.ones(batch_size, 8)
"""


def test_a_gradient_that_is_zero_but_for_rounding_has_the_scale_of_its_module() -> None:
    """As that of a bias before a batch norm."""
    plain = {"fuse.weight": torch.tensor([2.0]), "fuse.bias": torch.tensor([1e-7]), "head.bias": torch.tensor([1e-7])}
    found = {**plain, "fuse.bias": torch.tensor([-1e-7]), "head.bias": torch.tensor([-1e-7])}
    errors = gradient_errors(plain, found)
    assert errors == pytest.approx({"fuse.weight": 0.0, "fuse.bias": 1e-7, "head.bias": 1e-4})
    assert gradient_errors(plain, {"fuse.bias": torch.tensor([1e-4])})["fuse.bias"] > 4e-5  # far from rounding


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float16", 0.012), ("bfloat16", 0.1)])
def test_tolerance_follows_dtype(dtype: str, tolerance: float) -> None:
    """8 + 2 sqrt(4 micro-batches) roundings."""
    file = small_example("transformer_lm")
    file.model.to(getattr(torch, dtype))
    plan = unmeasured_plan(small_example("transformer_lm"), num_devices=2)
    data = BatchStream(file, plan.batch_size, seed=0)
    found = plain_reference(file, plan, *data.peek()).tolerance
    assert found == pytest.approx(tolerance, rel=0.1)


def test_invalid_options_refused() -> None:
    with pytest.raises(UsageError, match="0 steps"):
        RunOptions(num_steps=0)
    with pytest.raises(UsageError, match="timeout"):
        RunOptions(timeout_s=0.0)


def test_model_file_without_batches_refused(tmp_path: Path) -> None:
    path = tmp_path / "bare.py"
    path.write_text("from torch import nn\nmodel = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))\n")
    file = load_model_file(str(path), input_shapes="2,4")
    plan = unmeasured_plan(file, num_devices=2)
    with pytest.raises(ModelError, match="defines no batches; add it"):
        run_virtually(file, plan, RunOptions(num_steps=1))


def test_resume_skips_damaged_checkpoints(tmp_path: Path) -> None:
    file = small_example("transformer_lm")
    plan, saved = unmeasured_plan(file, num_devices=2), tmp_path / "saved"
    whole = run_virtually(file, plan, RunOptions(num_steps=5, save_every=1, checkpoints=str(saved)))
    for newer in ("step-000005", "step-000004"):
        shutil.rmtree(saved / newer)
    (saved / "step-000003" / ".metadata").write_bytes(b"")
    options = RunOptions(num_steps=5, resume=str(saved))
    told = f"going on from {saved / 'step-000002'}"
    with pytest.warns(UserWarning, match="step-000003 is damaged: .*; going on from"):
        resumed = run_forked(file.name, plan, options, settings=SMALL["transformer_lm"])
    assert told in resumed.notes[0]
    assert resumed.losses == pytest.approx(whole.losses[2:], rel=1e-5)


@pytest.mark.parametrize(("num_steps", "step"), [(1, 0), (2, 1), (3, 2), (4, 2), (60, 2)])
def test_memory_step(num_steps: int, step: int) -> None:
    assert RunOptions(num_steps=num_steps).memory_step == step
