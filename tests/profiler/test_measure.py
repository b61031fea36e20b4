"""Measured profiles: exact bytes, an unchanged model, and times of every layer."""

from __future__ import annotations

import copy
import json
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gplan.core import HostLoad, Link, Profile
from gplan.core.errors import ModelError, UsageError
from gplan.files import json_files
from gplan_profiler.measure import ProfileOptions, measure_profile
from gplan_profiler.model.load import ModelFile, model_in_memory
from tests.profiler.models import ConvNet, Tied

LINK = Link(latency_s=0.0, bytes_per_s=1e9)
OPTIONS = ProfileOptions(microbatch_sizes=(2,), link=LINK, budget_s=0.05, contention=0)


def in_memory(model: nn.Module, inputs: Any, targets: Any, loss: Any = None) -> ModelFile:
    def batches(batch_size: int) -> Any:
        while True:
            yield inputs(batch_size), targets(batch_size)

    return model_in_memory(
        model,
        loss=loss or (lambda output, target: F.cross_entropy(output, target)),
        optimizer=lambda parameters: torch.optim.Adam(parameters),
        batches=batches,
    )


def classes(batch_size: int) -> Tensor:
    return torch.arange(batch_size) % 4


def mlp() -> ModelFile:
    model = nn.Sequential(nn.Linear(256, 512), nn.Sigmoid(), nn.Linear(512, 4))
    return in_memory(model, lambda n: torch.randn(n, 256), classes)


def conv_net() -> ModelFile:
    def loss(output: Any, target: Tensor) -> Tensor:
        return F.cross_entropy(output["logits"], target)

    return in_memory(ConvNet(), lambda n: torch.randn(n, 3, 8, 8), classes, loss)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return measure_profile(mlp(), OPTIONS)


def test_weights_and_gradients_are_counted_to_the_byte(profile: Profile) -> None:
    first, sigmoid, last = profile.layers
    assert (first.weight_bytes, first.gradient_bytes, first.num_parameters) == (4 * 131_584, 4 * 131_584, 131_584)
    assert (sigmoid.weight_bytes, last.num_parameters) == (0, 512 * 4 + 4)


def test_the_stash_is_charged_to_the_layer_that_produced_it(profile: Profile) -> None:
    first, sigmoid, last = (layer.costs[0] for layer in profile.layers)
    assert first.stash_bytes == 0  # a sigmoid keeps its result, not its input
    assert sigmoid.stash_bytes == 2 * 512 * 4
    assert (first.output_bytes, first.output_unsaved_bytes) == (2 * 512 * 4, 2 * 512 * 4)
    assert (sigmoid.output_bytes, sigmoid.output_unsaved_bytes) == (2 * 512 * 4, 0)
    assert last.output_gradient_bytes == 2 * 4 * 4


def test_every_layer_and_the_loss_have_times_with_spread(profile: Profile) -> None:
    for cost in [*(layer.costs[0] for layer in profile.layers), *profile.loss]:
        for timing in (cost.forward, cost.backward):
            assert timing.num_samples > 0
            assert timing.low_s <= timing.median_s <= timing.high_s
    assert all(layer.costs[0].recompute is not None for layer in profile.layers)
    assert profile.step.optimizer.num_samples > 0


def test_adam_state_bytes_of_a_profile(profile: Profile) -> None:
    num_tensors = 4
    assert profile.step.state_bytes == 2 * 4 * profile.num_parameters + 4 * num_tensors
    assert profile.step.optimizer_name == "Adam"


def test_shared_parameter_counts_once() -> None:
    file = in_memory(Tied(), lambda n: torch.arange(n * 5).view(n, 5) % 11, lambda n: torch.zeros(n, 5, dtype=torch.long),
                     lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten()))  # fmt: skip
    found = measure_profile(file, OPTIONS)
    assert [(x.name, x.layers, x.num_parameters) for x in found.shared_weights] == [("embedding.weight", (0, 4), 88)]
    assert found.num_parameters == sum(x.numel() for x in file.model.parameters())


def count(module: Any, _inputs: object) -> None:
    module.num_calls += 1
    module.calls += 1


def test_profiling_restores_the_model() -> None:
    file = conv_net()
    file.model.stem.weight.grad = torch.ones_like(file.model.stem.weight)  # type: ignore[union-attr,arg-type]
    file.model.blocks.eval()  # type: ignore[union-attr]
    file.model.register_forward_pre_hook(count)  # type: ignore[union-attr]
    file.model.num_calls, file.model.calls = 0, torch.zeros(())  # type: ignore[union-attr,assignment]
    before, state = copy.deepcopy(file.model.state_dict()), torch.random.get_rng_state()
    measure_profile(file, OPTIONS)
    assert file.model.num_calls == file.model.calls == 0  # type: ignore[union-attr]
    for name, x in file.model.state_dict().items():
        assert torch.equal(x, before[name]), name
    for name, x in file.model.named_parameters():
        assert (x.grad is not None) == (name == "stem.weight"), name
    assert float(file.model.stem.weight.grad.mean()) == 1.0  # type: ignore[union-attr,arg-type]
    assert next(name for name, x in file.model.named_modules() if not x.training) == "blocks"
    assert torch.equal(torch.random.get_rng_state(), state)


def test_several_microbatch_sizes() -> None:
    found = measure_profile(mlp(), ProfileOptions(microbatch_sizes=(1, 3), link=LINK, budget_s=0.05, contention=0))
    assert found.microbatch_sizes == (1, 3)
    one, three = found.layers[1].costs
    assert three.stash_bytes == 3 * one.stash_bytes


def test_frozen_layers_have_weights_without_gradients() -> None:
    file = mlp()
    file.model[0].requires_grad_(False)  # type: ignore[index,union-attr]
    found = measure_profile(file, OPTIONS)
    assert (found.layers[0].weight_bytes > 0, found.layers[0].gradient_bytes) == (True, 0)
    assert found.layers[0].costs[0].output_gradient_bytes == 0


def test_progress_rises_and_names_each_part() -> None:
    # It stayed at 75 % without a text while memory was followed, operations counted and the optimizer's step measured again.
    told = list[tuple[str, float]]()
    measure_profile(mlp(), replace(OPTIONS, budget_s=0.01), progress=lambda text, share: told.append((text, share)))
    shares = [share for _, share in told]
    assert shares == sorted(shares) and shares[0] >= 0 and shares[-1] < 1
    texts = [text for text, _ in told]
    for part in (
        "running the model",
        "step, round 1 of 4",
        ", round 10",
        "memory of the layers",
        "operations",
        "of 4, again",
    ):
        assert any(part in text for text in texts), part
    again = [share for text, share in told if "again" in text]
    assert len(set(again)) == len(again) == 8 and min(again) >= 0.75


def test_wrong_inputs_are_named_with_shape() -> None:
    file = in_memory(nn.Linear(8, 4), lambda n: torch.randn(n, 9), classes)
    with pytest.raises(ModelError, match=r"fails on its inputs, \(2, 9\) float32"):
        measure_profile(file, OPTIONS)


def test_loss_of_each_sample_alone_is_refused_with_what_to_write() -> None:
    # "returned shape (2,); expected a scalar, ()" did not say that the samples are to be put together.
    file = in_memory(nn.Linear(8, 4), lambda n: torch.randn(n, 8), classes, lambda output, _: output.sum(1))
    text = r"tensor of shape \(2,\); expected a tensor with a single number for all samples together: end it with .mean\(\)"
    with pytest.raises(ModelError, match=text):
        measure_profile(file, OPTIONS)


def test_batches_of_another_size_are_refused_with_both_numbers() -> None:
    file = in_memory(nn.Linear(8, 4), lambda n: torch.randn(n + 1, 8), classes)
    with pytest.raises(ModelError, match=r"shape \(3, 8\); expected 2 samples"):
        measure_profile(file, OPTIONS)


def test_micro_batch_sizes_that_make_no_sense_are_refused() -> None:
    for sizes in ((), (0,), (4, 2)):
        with pytest.raises(UsageError, match="micro-batch sizes"):
            ProfileOptions(microbatch_sizes=sizes)
    with pytest.raises(UsageError, match="threads"):
        ProfileOptions(num_threads=10_000)


class Narrow(nn.Module):
    """A layer for which memory suffices up to two samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 2:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")
        return self.inner(x)


def narrow() -> ModelFile:
    return in_memory(nn.Sequential(nn.Linear(8, 8), Narrow(), nn.Linear(8, 4)), lambda n: torch.randn(n, 8), classes)


def test_too_large_sizes_are_left_out() -> None:
    found = measure_profile(narrow(), replace(OPTIONS, microbatch_sizes=(2, 4)))
    assert found.microbatch_sizes == (2,)
    assert "sizes from 4 up were left out" in found.notes[-1] and "1 (Narrow)" in found.notes[-1]


class FailingBackward(torch.autograd.Function):
    """Its backward raises."""

    @staticmethod
    def forward(_context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_context: Any, *_gradients: Tensor) -> Any:
        raise RuntimeError("no gradient here")


def test_a_backward_that_fails_names_its_layer() -> None:
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return FailingBackward.apply(x)  # type: ignore[no-any-return, no-untyped-call]

    model = nn.Sequential(nn.Linear(4, 4), Failing())
    with pytest.raises(ModelError, match="layer 1 fails in its backward pass: .*no gradient here"):
        measure_profile(in_memory(model, lambda n: torch.randn(n, 4), classes), OPTIONS)


def test_a_loss_without_a_gradient_is_refused() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target).detach()

    file = in_memory(nn.Sequential(nn.Linear(4, 4)), lambda n: torch.randn(n, 4), classes, loss)
    with pytest.raises(
        ModelError, match=r"loss in Sequential returned a torch.float32 tensor that has no gradient; expected .*detach"
    ):
        measure_profile(file, OPTIONS)


def test_too_large_single_size_is_an_error() -> None:
    with pytest.raises(ModelError, match=r"1 \(Narrow\)"):
        measure_profile(narrow(), replace(OPTIONS, microbatch_sizes=(4,)))


def test_alike_layers_are_measured_once() -> None:
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(12)]
    file = in_memory(nn.Sequential(*blocks, nn.Linear(16, 4)), lambda n: torch.randn(n, 16), classes)
    found = measure_profile(file, OPTIONS)
    assert [layer.same_as for layer in found.layers] == [None, None, None, None, *[2] * 7, None, None]
    assert found.layers[7].costs == found.layers[2].costs
    assert found.num_parameters == sum(x.numel() for x in file.model.parameters())
    assert found.layers[1].costs[0].forward == found.layers[11].costs[0].forward  # their samples are pooled


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="company needs a second core")
def test_contention_is_measured() -> None:
    found = measure_profile(mlp(), replace(OPTIONS, contention=1))
    assert found.num_neighbours == 1
    assert all(layer.costs[0].slow_down >= 1.0 for layer in found.layers)
    assert found.step.slow_down >= 1.0


class OnlyPositive(nn.Module):
    """Returns its rows with a positive sum too, whose number depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden, is_chosen = self.first(x), x.sum(1) > 0
        rows = 2.0 * hidden[is_chosen]
        return {"rows": rows, "y": self.last(hidden.masked_scatter(is_chosen[:, None], rows))}


@pytest.mark.parametrize("uses_rows", ["never", "if they are there", "always"])
def test_a_loss_of_outputs_that_no_stage_returns_is_refused(uses_rows: str) -> None:
    torch.manual_seed(0)

    def loss(output: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
        found = nn.functional.cross_entropy(output["y"], target)
        uses = uses_rows == "always" or (uses_rows != "never" and output["rows"] is not None)
        return found + output["rows"].sum() / len(target) if uses else found

    file = in_memory(OnlyPositive(), lambda n: torch.randn(n, 8), classes, loss=loss)
    if uses_rows == "never":
        assert any("whose size depends on data" in x for x in measure_profile(file, OPTIONS).notes)
        return
    with pytest.raises(ModelError, match="uses tensors of the model's output whose size depends on data"):
        measure_profile(file, OPTIONS)


def test_too_much_contention_is_refused() -> None:
    with pytest.raises(UsageError, match="has cores for"):
        ProfileOptions(contention=10_000)


def test_contention_on_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gplan_profiler.measure.cuda_problem", lambda: None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert ProfileOptions(device="cuda", link=LINK).num_neighbours == 0
    with pytest.raises(UsageError, match="--contention 1 with --device cuda"):
        ProfileOptions(device="cuda", link=LINK, contention=1)


def test_disturbed_layers_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gplan_profiler.timing.clock.is_undisturbed", lambda _wall_s, _busy_s: False)
    for load, words in (
        (HostLoad(wait_share=0.2), "disturbed by other work (20.0 % of"),
        (HostLoad(), "interrupted by an unknown cause"),
    ):
        monkeypatch.setattr("gplan_profiler.timing.layer_timing.load_between", lambda _before, _after, load=load: load)
        notes = measure_profile(mlp(), OPTIONS).notes
        assert any(f"nearly all samples of 0, 1, 2, the loss were {words}" in note for note in notes), notes


def test_uncounted_operations_are_noted() -> None:
    class Chooses(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x if x.square().sum() >= 0 else x  # always the same, but by values

    model = nn.Sequential(nn.Linear(8, 4), Chooses())
    found = measure_profile(in_memory(model, lambda n: torch.randn(n, 8), classes), OPTIONS)
    assert all(not x.costs[0].forward_work for x in found.layers)
    assert "operations are not counted, as control flow depends on the values of tensors" in found.notes


def test_halves_and_pending_bytes_of_a_profile(profile: Profile) -> None:
    first, sigmoid, last = (layer.costs[0] for layer in profile.layers)
    assert first.input_gradient is None and first.weight_gradient is not None  # all of it
    assert last.input_gradient is not None and last.weight_gradient is not None
    assert (first.pending_bytes, sigmoid.pending_bytes, last.pending_bytes) == (0, 0, 0)
    assert profile.loss[0].pending_bytes + profile.loss[0].stash_bytes >= 2 * 4 * 4  # the gradient of the logits


def test_halves_of_a_layer_ending_in_a_view() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Conv1d(1, 4, 1), nn.Flatten(), nn.Linear(32, 4))
    file = in_memory(model, lambda n: torch.randn(n, 1, 8), classes)
    assert all(layer.costs[0].has_halves for layer in measure_profile(file, OPTIONS).layers)


class Recomputing(nn.Linear):
    """torch's reentrant checkpoint refuses a backward for some inputs only."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=True)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_unsplittable_backward_is_noted() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Recomputing(8, 8), nn.Linear(8, 4))
    found = measure_profile(in_memory(model, lambda n: torch.randn(n, 8), classes), OPTIONS)
    assert not any(layer.costs[0].has_halves or layer.costs[0].pending_bytes for layer in found.layers)
    assert any(
        "cannot be split" in note and "layer 1: RuntimeError: When use_reentrant" in note for note in found.notes
    )


def test_a_profile_from_before_there_were_halves_is_read(profile: Profile) -> None:
    content = json.loads(json_files.to_json(profile))
    for cost in [*(cost for layer in content["layers"] for cost in layer["costs"]), *content["loss"]]:
        del cost["pending_bytes"], cost["input_gradient"], cost["weight_gradient"], cost["weight_workspace_bytes"]
        del cost["input_workspace_bytes"], cost["grown_bytes"]
    found = json_files.parse(Profile, json.dumps(content).encode(), name="old.json")
    assert not found.layers[2].costs[0].has_halves
    assert found.layers[2].costs[0].backward == profile.layers[2].costs[0].backward


def test_the_work_of_every_layer_is_counted_beside_its_times(profile: Profile) -> None:
    work = {x.kind: x for x in profile.layers[0].costs[0].forward_work}
    assert work["matmul"].num_flops == 2 * 2 * 256 * 512


def test_lazy_model_is_measured_layer_by_layer() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)), nn.Linear(256, 4))
    file = in_memory(model, lambda n: torch.randn(n, 256), classes)
    found = measure_profile(file, OPTIONS)
    assert all(layer.costs[0].forward.num_samples > 0 for layer in found.layers)
    assert all(layer.costs[0].has_halves for layer in found.layers)
    assert found.layers[0].weight_bytes == 4 * (256 * 256 + 256)
    assert found.whole_model == ()
    real = in_memory(
        nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)), nn.Linear(256, 4)),
        lambda n: torch.randn(n, 256),
        classes,
    )
    expected = measure_profile(real, OPTIONS)
    for ours, theirs in zip(found.layers, expected.layers, strict=True):
        assert (ours.costs[0].stash_bytes, ours.costs[0].output_bytes, ours.costs[0].pending_bytes) == (
            theirs.costs[0].stash_bytes,
            theirs.costs[0].output_bytes,
            theirs.costs[0].pending_bytes,
        )
    assert not any(type(x) is nn.Parameter and not x.is_meta and x.grad is not None for x in file.model.parameters())


def test_an_unknown_device_and_a_missing_gpu_are_named() -> None:
    for device in ("gpu", "cuda:", "cuda:x", "cuda:٣"):
        with pytest.raises(UsageError, match="expected auto, cpu, cuda, cuda:1 or meta"):
            ProfileOptions(device=device)
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="torch .* (is a build for CPUs|sees no GPU).*; or use --device cpu"):
            ProfileOptions(device="cuda")


def test_measured_operations_of_repeated_blocks() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU()) for _ in range(7))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x + block(x)
            return x

    found = measure_profile(
        in_memory(Deep(), lambda n: torch.randn(n, 4), classes), replace(OPTIONS, granularity="op", contention=0)
    )
    assert [x.name for x in found.layers[:3]] == ["blocks.0.0", "blocks.0.1", "blocks.1.0"]
    assert [x.kind for x in found.layers[:2]] == ["layer_norm", "linear"]
    alike = [x.same_as for x in found.layers if x.same_as is not None]
    assert alike and all(found.layers[x].kind == y.kind for x, y in zip(alike, found.layers[8:], strict=False))
    assert found.whole_model and found.whole_model[0].forward.num_samples > 0


def test_a_profile_on_a_busy_host_is_doubted(profile: Profile) -> None:
    quiet, busy = (replace(profile, whole_model=(), host_load=HostLoad(wait_share=x)) for x in (0.1, 0.5))
    assert quiet.doubts == ()
    (doubt,) = busy.doubts
    assert "expected both below 20.0 %" in doubt
    assert doubt.startswith("other work disturbed this profile (50.0 % of the time waiting for a core")


@pytest.mark.parametrize(
    ("load", "ratio", "words"),
    [
        (HostLoad(wait_share=0.3), 1.4, "not quiet meanwhile (30.0 % of the time waiting for a core"),
        (HostLoad(steal_share=0.3), 2.5, "does not explain a factor of 2.50, so this model's layers do not add up"),
        (HostLoad(), 1.4, "there is no sign of other work"),
        (None, 1.4, "profile again, and if the difference stays"),
    ],
)
@pytest.mark.parametrize("layers_are_slow", [True, False])
def test_doubts_blame_other_work_only_with_evidence(
    profile: Profile, load: HostLoad | None, *, ratio: float, words: str, layers_are_slow: bool
) -> None:
    (whole,) = profile.whole_model
    forward_s, backward_s = profile.one_stage_s(0)
    factor = 1.0 / ratio if layers_are_slow else ratio
    slow = replace(
        whole,
        forward=whole.forward.times(forward_s * factor / whole.forward.median_s),
        backward=whole.backward.times(backward_s / whole.backward.median_s),
    )
    (doubt,) = replace(profile, whole_model=(slow,), host_load=load).doubts
    assert doubt.startswith("do not rely on these times") and words in doubt


def test_a_profile_has_the_load_of_its_host(profile: Profile) -> None:
    assert profile.host_load is not None
    again = json_files.parse(Profile, json_files.to_json(profile), name="profile")
    assert again.host_load == profile.host_load


def test_note_on_contention_of_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gplan_profiler.measure.max_neighbours", lambda _: 3)
    assert not ProfileOptions(microbatch_sizes=(2,), num_threads=1).notes
    assert not ProfileOptions(microbatch_sizes=(2,), num_threads=2, contention=0).notes
    (note,) = ProfileOptions(microbatch_sizes=(2,), num_threads=2).notes
    assert "beside processes of one thread, not of 2" in note


def test_a_process_that_may_use_one_core_is_refused_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gplan_profiler.measure.usable_cores", lambda: [3])
    with pytest.raises(UsageError, match="2 threads were requested; this process may use 1 core"):
        ProfileOptions(num_threads=2)
