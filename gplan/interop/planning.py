"""Plans under the rules of another trainer: the best one that it can run, and its own layout priced."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from gplan.core import Constraints, Plan, Profile
from gplan.core.errors import UsageError
from gplan.core.units import percent_text
from gplan.interop.author_layers import author_layers, authored_profile
from gplan.interop.layouts import Layout, read_layout
from gplan.interop.receivers import (
    constraints_for,
    decoder_of,
    indivisible,
    most_stages,
    receiver_named,
    settings_problem,
)
from gplan.partition.balance import alternative_of, best_plan, problem_of
from gplan.partition.validation import combined
from gplan.schedules.registry import default_num_microbatches, num_stages_of
from gplan.schedules.request import PipelineSetting, PlanRequest
from gplan.strategy_search.planner import balance, with_counts
from gplan_profiler.analytic.decoder_profile import UNDIVIDED


@dataclass(frozen=True, slots=True, kw_only=True)
class ForReceiver:
    """The rules of a receiver as arguments of a search."""

    name: str
    constraints: Constraints
    most_stages: int
    why_no_more: str
    prediction: tuple[str, ...] = ()  # multi-token prediction and the head, where the former is on no first device

    @classmethod
    def of(cls, name: str, profile: Profile) -> ForReceiver:
        """The rules for a profile; raises UsageError for a model that the receiver cannot take."""
        constraints, whole = constraints_for(name, profile), authored_profile(profile)
        names = [layer.name for layer in whole.layers]
        most, why = most_stages(names, indivisible(name, names, whole))
        prediction = range(0)
        if receiver_named(name).cuts == "decoder" and len(whole.layers) == len(profile.layers):
            prediction = decoder_of(names, name, whole).prediction
        last = names[prediction.start : prediction.stop + 1] if prediction else []
        return cls(name=name, constraints=constraints, most_stages=most, why_no_more=why, prediction=tuple(last))

    def constraints_on(self, num_devices: int) -> Constraints:
        """The constraints; with few devices multi-token prediction stays with the head, as it would else be on the first one."""
        if not 1 < num_devices <= len(self.prediction):
            return self.constraints
        kept = (self.prediction[0], self.prediction[-1])
        return replace(self.constraints, keep_together=(*self.constraints.keep_together, kept))

    def allows(self, setting: PipelineSetting) -> bool:
        """Whether the receiver can run a pipeline so."""
        return not settings_problem(self.name, setting)

    def applied(self, request: PlanRequest) -> PlanRequest:
        """The request under the receiver's rules; raises UsageError for settings that it cannot run."""
        request = with_counts(request)
        num_devices, num_microbatches = request.num_devices, request.num_microbatches
        if not request.is_open and isinstance(num_devices, int) and isinstance(num_microbatches, int):
            self.check(
                PipelineSetting(
                    schedule=request.schedule, recompute=request.recompute, num_devices=num_devices,
                    num_microbatches=num_microbatches,
                )
            )  # fmt: skip
        on_devices = self.constraints_on(num_devices) if isinstance(num_devices, int) else self.constraints
        constraints = combined([request.constraints, on_devices])
        return replace(request, constraints=constraints, allows=self.allows)

    def default_schedule(self, num_chunks: int = 1) -> str:
        """The schedule where none is named, by the stages of a device."""
        return receiver_named(self.name).default_schedule if num_chunks == 1 else f"interleaved-1f1b:{num_chunks}"

    def check(self, settings: PipelineSetting) -> None:
        """Raise UsageError for settings that the receiver cannot run."""
        if problem := settings_problem(self.name, settings):
            raise UsageError(f"the plan {problem}")
        if settings.num_stages > self.most_stages and self.why_no_more:
            raise UsageError(
                f"the plan has {settings.num_stages} stages, of this model at most {self.most_stages}: {self.why_no_more}"
            )


def import_plan(
    layout: str,
    profile: Profile,
    *,
    receiver: str,
    num_devices: int | None = None,
    num_microbatches: int | None = None,
    schedule: str | None = None,
    **options: Any,
) -> Plan:
    """The plan that a trainer's layout is, with the best one that the trainer can run beside it in `Plan.rivals`.

    `layout` is the text that the trainer reads, or that of a file which holds it (`gplan.interop.layouts`). Devices,
    micro-batches and recompute are by default what the text says, else there is one device for each stage, with four
    micro-batches for each; the schedule is the receiver's, interleaved where devices have several stages. `options` are those
    of `gplan.balance`.

    Raises UsageError for a layout that does not fit the profile, NoPlanError for one that does not fit the memory.
    """
    rules = ForReceiver.of(receiver, profile)
    found = read_layout(layout, authored_profile(profile), receiver=receiver)
    parts = author_layers([layer.name for layer in profile.layers], profile.model.divided)
    found = replace(found, cuts=tuple(parts[x][1].start for x in found.cuts))
    for what, count in (("devices", num_devices), ("micro-batches", num_microbatches)):
        if count is not None and count < 1:
            raise UsageError(f"asked for {count} {what}; expected at least 1")
    num_devices = num_devices or found.numbers.get("num_devices") or found.num_stages
    size = options.get("microbatch_size") or found.numbers.get("microbatch_size") or max(profile.microbatch_sizes)
    options = {**options, "microbatch_size": size, "recompute": options.get("recompute") or found.recompute or "never"}
    num_microbatches, notes = _num_microbatches(found, size, profile, num_microbatches)
    num_microbatches = num_microbatches or default_num_microbatches(num_devices)
    if schedule is None:
        chunks, rest = divmod(found.num_stages, num_devices)
        if rest:
            raise UsageError(
                f"the layout has {found.num_stages} stages, which {num_devices} devices cannot share equally; give --k"
            )
        schedule = rules.default_schedule(chunks)
    if (num_stages := num_stages_of(schedule, num_devices)) != found.num_stages:
        raise UsageError(
            f"the layout has {found.num_stages} stages; {schedule} on {num_devices} devices has {num_stages}; give another --k or "
            "--schedule"
        )
    counts: dict[str, Any] = {"num_devices": num_devices, "num_microbatches": num_microbatches}
    if (replicas := int(dict(profile.model.settings).get(UNDIVIDED, "1"))) > 1:  # of a computed profile
        options = {"num_replicas": replicas, "sharding": "optimizer", **options}
    rules.check(PipelineSetting(schedule=schedule, recompute=options.get("recompute", "never"), **counts))
    common = {**counts, "schedule": schedule, **options}
    names = [layer.name for layer in profile.layers]
    for first, last in rules.constraints.keep_together:
        for cut in found.cuts:
            if names.index(first) < cut <= names.index(last):
                raise UsageError(
                    f"the layout cuts before {names[cut]}; {receiver} keeps {first} to {last} on one stage"
                )
    given = Constraints(
        cut_after=tuple(names[x - 1] for x in found.cuts), profile_order=rules.constraints.profile_order
    )
    fixed = {**common, "memory_bytes": options.get("memory_bytes") or profile.device.memory_bytes}
    fixed.pop("time_limit_s", None)  # nothing is searched
    plan = best_plan(problem_of(profile, PlanRequest(constraints=given, **fixed)))
    best = min(balance(profile, constraints=rules.constraints, **common), plan, key=lambda x: x.prediction.step_s)
    free = [x for x in best.rivals if x.step_s < best.prediction.step_s * (1 - 1e-9)]  # where the rules cost something
    rivals = (alternative_of(best, label=f"best for {receiver_named(receiver).title}"), *free)
    bound_s = min(best.proof.lower_bound_s, plan.proof.objective_s)
    proof = replace(plan.proof, solver="the layout given", lower_bound_s=bound_s)
    ratio = plan.prediction.step_s / best.prediction.step_s - 1
    peak = plan.peak_bytes / best.peak_bytes - 1 if best.peak_bytes else 0.0
    notes = [*plan.notes, *found.left_out, *notes, "the layout is as good as the best one"]
    if plan.cuts != best.cuts and ratio >= 1e-9:
        sign = "+" if peak >= 0 else "-"
        notes[-1] = (
            f"the layout takes {percent_text(ratio)} longer than the best one; its largest peak is {sign}{percent_text(abs(peak))}"
        )
    if (trainer := receiver_named(receiver)).serves:
        notes.append(f"{trainer.title} serves: the step and memory are those of a training with this cut")
    if UNDIVIDED in (widths := dict(plan.model.settings)):  # of a language model
        tensor, each = int(widths["tensor"]), f"{plan.num_replicas} replicas (data x context)"
        notes.append(f"tensor {tensor} x pipeline {plan.num_devices} x {each} = {tensor * plan.num_ranks} devices")
    return replace(plan, rivals=rivals, proof=proof, notes=tuple(notes))


def _num_microbatches(found: Layout, size: int, profile: Profile, asked: int | None) -> tuple[int | None, list[str]]:
    """The micro-batches of a pipeline that are asked for, or that the file of a layout has, with notes.

    Raises UsageError for a file with other widths than the profile's.
    """
    widths, given = dict(profile.model.settings), found.numbers
    own = {**widths, "microbatch_size": str(profile.microbatch_sizes[0])} if "data" in widths else widths  # if computed
    for name in ("tensor", "context", "expert", "sequence_length", "microbatch_size"):
        if name in given and name in own and int(own[name]) != given[name]:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(
                f"the file has {flag} {given[name]}, the profile {own[name]}; make the profile with gplan layout {flag} {given[name]}"
            )
    replicas = int(widths.get("data", "1"))
    samples = given.get("pipeline_batch") if found.num_stages > 1 or "batch_size" not in given else None
    if asked or "num_microbatches" in given:
        return asked or given["num_microbatches"], []
    if samples is None:
        samples, rest = divmod(given.get("batch_size", 0), replicas)
        if rest:
            raise UsageError(
                f"the file has a batch of {given['batch_size']} samples; expected a multiple of the profile's {replicas} replicas"
            )
    if samples % size:
        raise UsageError(
            f"{samples} samples of a pipeline are no multiple of micro-batches of {size}; give another --microbatch-size"
        )
    if "data" in widths or not samples or (found.num_stages > 1 and "pipeline_batch" in given):
        return samples // size or None, []
    return samples // size, [
        f"all {samples} samples of the file's batch go through one pipeline; with N replicas give --microbatches {samples // size} / N"
    ]
