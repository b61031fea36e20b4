"""Precisions: losses beside plain loops, checkpoints of master weights, bytes, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gplan
from gplan.core import Link, Plan, Precision, Profile
from gplan.core.errors import FileError, ModelError, UsageError
from gplan.runtime.pipeline import Pipeline
from gplan_profiler.capture.capture import capture
from tests.memo import memoized
from tests.runtime.ranks import on_ranks
from tests.runtime.semantics.checks import MICROBATCH_SIZE, both_engines, built
from tests.runtime.semantics.models import WIDTH, Floor, Subject, Tied, Tower, subject, token_subject

LM = "examples/transformer_lm.py"
SMALL = {"num_blocks": 2, "width": 32, "num_heads": 2, "sequence_length": 16}
LINK = Link(latency_s=0.0, bytes_per_s=1e9)
SETTINGS = (
    ("frozen", "mixed", "never"),
    ("frozen", "mixed-bf16-gradients", "always"),
    ("frozen", "autocast", "always"),
    ("tied", "mixed", "always"),
    ("tied", "bfloat16", "never"),
)


class Frozen(Tower):
    """Its second layer is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.floors[1].requires_grad_(False)


CASES = {"frozen": subject(Frozen), "tied": token_subject(Tied)}


@memoized
def profile_in(case: str, precision: str) -> Profile:
    """A quick profile."""
    found = CASES[case]
    return gplan.profile(
        built(found),
        inputs=lambda n: found.batch(n)[0],
        microbatch_sizes=[MICROBATCH_SIZE],
        link=LINK,
        contention=0,
        budget_s=0.01,
        precision=precision,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("precision", ["mixed", "mixed-bf16-gradients", "bfloat16"])
def test_several_microbatch_sizes_in_one_profile(precision: str) -> None:
    found = CASES["frozen"]
    profile = gplan.profile(
        built(found),
        loss=found.loss,
        inputs=lambda n: found.batch(n)[0],
        microbatch_sizes=[2, 4],
        link=LINK,
        contention=0,
        budget_s=0.01,
        precision=precision,  # type: ignore[arg-type]
    )
    assert profile.microbatch_sizes == (2, 4) and profile.precision.name == precision


def plan_in(case: str, precision: str, *, num_devices: int = 2, **options: Any) -> Plan:
    return gplan.balance(profile_in(case, precision), num_devices=num_devices, num_microbatches=4, **options)


def float_loss(case: Subject) -> Any:
    return lambda output, target: case.loss(output.float(), target)


def trained(pipe: Pipeline, case: Subject, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    found = []
    for number in steps:
        found.append(pipe.step(*case.batch(8, seed=number)).item())
        pipe.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return found


def plainly(case: Subject, name: str) -> list[float]:
    """The losses of a loop over micro-batches without gplan."""
    precision, model = Precision.named(name), built(case)
    parameters = [x for x in model.parameters() if x.requires_grad]
    masters = [nn.Parameter(x.detach().clone()) for x in parameters] if precision.master_weights else parameters
    if precision.parameters == "bfloat16":
        model.to(torch.bfloat16)
    optimizer, losses = torch.optim.AdamW(masters, lr=0.01), []
    for number in range(4):
        inputs, targets = (x.split(MICROBATCH_SIZE) for x in case.batch(8, seed=number))
        sums = [torch.zeros_like(x, dtype=getattr(torch, precision.gradients or "")) for x in masters]
        total = 0.0
        for x, y in zip(inputs, targets, strict=True):
            x = x.bfloat16() if x.is_floating_point() and precision.parameters == "bfloat16" else x
            with torch.autocast("cpu", torch.bfloat16) if precision.autocast else nullcontext():
                loss = case.loss(model(x).float(), y) / 4
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
            for one, parameter in zip(sums, parameters, strict=True):
                assert parameter.grad is not None
                one += parameter.grad
                parameter.grad = None
        for master, one in zip(masters, sums, strict=True):
            master.grad = one.to(master.dtype)
        nn.utils.clip_grad_norm_(masters, 0.5)
        optimizer.step()
        if precision.master_weights:
            with torch.no_grad():
                torch._foreach_copy_(parameters, masters)
        losses.append(total)
    return losses


def test_losses_equal_a_plain_loop() -> None:
    """Gradients of tied weights, and norms of bfloat16 gradients, are rounded before or after they are added up."""
    plans = [plan_in(case, name, recompute=recompute, schedule="1f1b") for case, name, recompute in SETTINGS]

    def script() -> list[list[float]]:
        found = []
        for (case, *_), plan in zip(SETTINGS, plans, strict=True):
            pipe = gplan.pipeline(CASES[case].build, plan, loss=float_loss(CASES[case]), inputs=CASES[case].batch(2)[0])
            found.append(trained(pipe, CASES[case], torch.optim.AdamW(pipe.parameters(), lr=0.01), range(4)))
        return found

    for by_rank in both_engines(2, script).values():
        for found in by_rank:
            for (case, name, _), losses in zip(SETTINGS, found, strict=True):
                expected = plainly(CASES[case], name)
                assert losses[0] == pytest.approx(expected[0], rel=1e-6), (case, name)
                assert losses == pytest.approx(expected, rel=0.03 if case == "tied" else 0.01), (case, name)


def test_replicas_with_master_weights() -> None:
    """Each replica has half of the micro-batches; whole or divided by FSDP2, the losses are those of the plain loop."""
    case = CASES["frozen"]
    plan = gplan.balance(profile_in("frozen", "mixed"), num_devices=1, num_microbatches=2)
    plans = [replace(plan, num_replicas=2, sharding=sharding) for sharding in ("none", "optimizer", "weights")]

    def job(_rank: int) -> list[list[float]]:
        pipes = [gplan.pipeline(case.build, x, loss=float_loss(case), inputs=case.batch(2)[0]) for x in plans]
        return [trained(x, case, torch.optim.AdamW(x.parameters(), lr=0.01), range(2)) for x in pipes]

    for found in on_ranks(2, job):
        assert all(losses == pytest.approx(plainly(case, "mixed")[:2], rel=1e-6) for losses in found)


def test_master_weights_resume_under_another_plan(tmp_path: Path) -> None:
    case = CASES["tied"]

    def opened(num_devices: int) -> tuple[Pipeline, torch.optim.Optimizer]:
        plan = plan_in("tied", "mixed", num_devices=num_devices)
        pipe = gplan.pipeline(case.build, plan, loss=float_loss(case), inputs=case.batch(2)[0])
        return pipe, torch.optim.AdamW(pipe.parameters(), lr=0.01)

    first, optimizer = opened(2)
    trained(first, case, optimizer, range(2))
    first.save(tmp_path, optimizer=optimizer)
    second, other = opened(4)
    second.load(tmp_path, optimizer=other)
    assert {x.dtype for x in second.parameters()} == {torch.float32}
    assert_equal(second.state_dict(), first.state_dict())
    expected = trained(first, case, optimizer, range(2, 4))
    assert trained(second, case, other, range(2, 4)) == pytest.approx(expected, rel=1e-2)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_gradients_of_several_steps_add_up_in_float32() -> None:
    case = CASES["frozen"]
    pipe = gplan.pipeline(case.build, plan_in("frozen", "mixed"), loss=float_loss(case), inputs=case.batch(2)[0])
    halves = [pipe.step(*case.batch(8, seed=number), scale=0.5) and copied(pipe) for number in range(2)]
    assert all(x.dtype == torch.float32 for x in halves[1].values())
    fresh = gplan.pipeline(case.build, plan_in("frozen", "mixed"), loss=float_loss(case), inputs=case.batch(2)[0])
    fresh.step(*case.batch(8, seed=1), scale=0.5)
    for name, second in copied(fresh).items():
        torch.testing.assert_close(halves[1][name], halves[0][name] + second)


def copied(pipe: Pipeline) -> dict[str, Tensor]:
    return {name: x.grad.clone() for name, x in pipe.named_parameters() if x.grad is not None}


LAYERS = nn.Sequential(nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 256, bias=False))
BYTES = {  # of a parameter, its gradient, its state, the master weight in that, and the optimizer's copy of the gradient
    "float32": (4, 4, 8, 0, 0),
    "bfloat16": (2, 2, 4, 0, 0),
    "mixed": (2, 4, 12, 4, 0),
    "mixed-bf16-gradients": (2, 2, 12, 4, 2),
    "autocast": (4, 4, 8, 0, 0),
}


@pytest.mark.parametrize("precision", BYTES)
def test_bytes_of_a_parameter(precision: Any) -> None:
    """Measured and computed alike."""

    def batches(num_samples: int) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield torch.ones(num_samples, 256), torch.ones(num_samples, 256)

    given: dict[str, Any] = {
        "loss": nn.functional.mse_loss,
        "optimizer": torch.optim.AdamW,
        "batches": batches,
        "microbatch_sizes": [2],
        "precision": precision,
    }
    measured = gplan.profile(LAYERS, **given, contention=0, budget_s=0.01, link=LINK)
    computed = gplan.profile(LAYERS, **given, device="meta", hardware="h100")
    weight, gradient, state, master, copy = BYTES[precision]
    for profile in (measured, computed):
        layer, step = profile.layers[0], profile.step
        number, all_parameters = layer.num_parameters, profile.num_parameters
        assert (layer.weight_bytes, layer.gradient_bytes) == (weight * number, gradient * number)
        assert step.state_bytes == state * all_parameters + 4 * sum(len(x.parameters) for x in profile.layers)
        assert step.master_bytes == master * all_parameters
        temporary = 4 * all_parameters if profile is computed else 0  # AdamW on a GPU updates all at once
        assert step.workspace_bytes == pytest.approx(
            (copy + temporary / all_parameters) * all_parameters, rel=0.6, abs=999
        )
    assert [x.costs[0].stash_bytes for x in measured.layers] == [x.costs[0].stash_bytes for x in computed.layers]
    assert {x.dtype for x in LAYERS.parameters()} == {torch.float32}


def test_peak_memory_and_gradients_of_a_run() -> None:
    profile = gplan.profile(
        LM, settings=SMALL, microbatch_sizes=[2], precision="mixed", contention=0, budget_s=0.01, link=LINK
    )
    plan = gplan.balance(profile, num_devices=2, num_microbatches=4, schedule="1f1b")
    run = gplan.run(plan, engine="virtual", num_steps=4, check=True)
    assert run.check is not None and run.check.passed
    assert [x.memory.peak_bytes for x in plan.stages] == pytest.approx(run.peak_bytes, rel=0.02)


class Casting(nn.Module):
    """Has an autocast of its own, around all layers or around a part that is to stay in float32."""

    def __init__(self, *, enabled: bool) -> None:
        super().__init__()
        self.floors, self.enabled = nn.ModuleList(Floor() for _ in range(2)), enabled

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.enabled):
            for floor in self.floors:
                x = floor(x)
        return x


def test_what_clashes_with_the_model_is_refused() -> None:
    with pytest.raises(UsageError, match="precision float16 needs a loss scaler, which gplan does not have"):
        gplan.profile(LM, precision="float16")  # type: ignore[arg-type]
    with pytest.raises(
        UsageError, match="precision 'half' is not known; expected one of model, float32, bfloat16, mixed"
    ):
        gplan.profile(LM, precision="half")  # type: ignore[arg-type]
    with pytest.raises(
        ModelError, match=r"Linear makes weight in float64; precision mixed takes a model in bfloat16 or float32"
    ):
        gplan.profile(nn.Linear(2, 2).double(), inputs=torch.ones(2, 2).double(), precision="mixed")
    inputs, mixed = torch.ones(2, WIDTH), Precision.named("autocast")
    with pytest.raises(
        ModelError, match="the model enables torch.autocast itself, which clashes with precision autocast"
    ):
        capture(Casting(enabled=True), inputs, precision=mixed)
    assert len(capture(Casting(enabled=False), inputs, precision=mixed)) == 2
    plan = plan_in("frozen", "mixed")
    with pytest.raises(
        UsageError, match="the plan was made for precision mixed, not autocast; leave the precision out"
    ):
        gplan.pipeline(CASES["frozen"].build, plan, precision="autocast")
    other = replace(plan, precision=Precision.named("autocast"))
    with pytest.raises(FileError, match=r"made for a Frozen with other parameters \(digest .*, now .* in float32\)"):
        gplan.pipeline(CASES["frozen"].build, other, inputs=inputs, loss=CASES["frozen"].loss)


def test_weights_loaded_after_rounding_are_rounded_again() -> None:
    case = CASES["tied"]
    pipe = gplan.pipeline(case.build, plan_in("tied", "mixed"), loss=float_loss(case), inputs=case.batch(2)[0])
    other = {name: x + 1 if x.is_floating_point() else x for name, x in pipe.state_dict().items()}
    pipe.round_master_weights(pipe.parameters())
    pipe.load_state_dict(other)
    batch = case.batch(8)
    loss = pipe.step(*batch).item()  # before an evaluation, which rounds all weights
    assert loss == pytest.approx(pipe.eval_step(*batch).item(), rel=1e-3)
