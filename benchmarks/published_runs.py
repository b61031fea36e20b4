"""Published pipeline runs on GPUs, predicted from sizes and widths alone, beside what was measured.

    python benchmarks/published_runs.py                      the rows of ../shared/data/published_runs; a minute or two
    python benchmarks/published_runs.py --data rows.csv      other rows with the same columns
    python benchmarks/published_runs.py --source nanotron    some sources alone; with --rows each row too
    python benchmarks/published_runs.py --report             writes reports/published-runs/ too

A row is a model's sizes, a GPU, widths, a schedule and what was measured. `SOURCES` says which trainer ran it and what its
models have that no column says. Layers are cut as the trainer cuts them. Nothing is fitted to a row: efficiencies are
those of the device (`hardware.toml`; for B200 the file that SimuMax measured) and traits those of the trainer
(`trainers.py`). Of each group of one model on one number of GPUs: Spearman's rank correlation of predicted and measured
throughput, and the regret, by how much the run that is predicted fastest was slower than the fastest. Rows that cannot be
predicted are counted with the reason.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from simumax import read_system_file
from suite import DATA as SHARED
from suite import markdown, options_of, write_report

from gplan.core import Constraints, Plan, StageCost
from gplan.core.errors import GplanError, UsageError
from gplan.core.units import percent_text
from gplan.cost.reserved_bytes import CONTEXT_BYTES, RESERVED_SHARE, device_reserved_bytes
from gplan.partition.balance import best_plan, problem_of
from gplan.schedules.registry import make_schedule
from gplan.schedules.request import PlanRequest
from gplan.simulation.simulator import step_and_bubble
from gplan_profiler.analytic import expected_errors
from gplan_profiler.analytic.decoder_config import Decoder, Widths
from gplan_profiler.analytic.decoder_profile import DecoderProfile
from gplan_profiler.analytic.expected_errors import ALL, DENSE, MIXTURE
from gplan_profiler.analytic.hardware import Hardware, described_hardware, load_hardware
from gplan_profiler.analytic.trainers import LEGACY, MEGATRON, NANOTRON, OVERLAPPING, Trainer, layers_by_cost

DATA = SHARED / "published_runs" / "given.csv"
B200_FILE = SHARED / "gpu_runs" / "b200_efficiency.json"
EXPECTED = Path(expected_errors.__file__).with_name("expected_errors.toml")
GIB = 2**30
PADDING = 128  # Megatron-LM pads the vocabulary to a multiple of this for each tensor-parallel rank
GPT: dict[str, Any] = {
    "is_gated": False, "has_norm_biases": True, "mlp_bias": True, "attention_bias": True, "vocab_size": 50257,
    "tie_word_embeddings": True,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "first_k_dense_replace": 1,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {  # what no column says, by a part of the model's name
    r"deepseek.?v2": {**LATENT, "n_shared_experts": 2},
    r"deepseek.?v3": {**LATENT, "n_shared_experts": 1},
    r"qwen3": {"head_dim": 128, "has_head_norms": True},
    r"gpt.?oss": {"head_dim": 64, "attention_bias": True, "has_sinks": True, "has_expert_biases": True},
    r"\b(gpt|bert)\b(?!.?oss)": GPT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What all runs of a source have in common."""

    trainer: Trainer = MEGATRON
    decoder: Mapping[str, Any] = field(default_factory=dict)
    fuses_cross_entropy: bool = False
    memory: str = (
        "allocated"  # the counter of its peaks: what tensors have, what the allocator reserved, or the device's
    )
    has_gigabytes: bool = False  # whether its peaks count 10^9 bytes, not 2^30
    reduction_hidden: float = 0.0  # share of the replicas' collectives beside computing
    times_count: bool = True  # whether its times say anything of the GPUs


SINGLE = replace(LEGACY, stores_scores=True)  # before flash attention
SOURCES: dict[str, Source] = {  # by the beginning of the name
    "SimuMax": Source(fuses_cross_entropy=True),
    "Vocabulary Parallelism": Source(trainer=LEGACY, decoder={"tie_word_embeddings": False}),
    "Zero Bubble": Source(trainer=SINGLE, has_gigabytes=True),  # its code logs 10^6 bytes, the paper's GB are 10^9
    "Ultra-Scale Playbook": Source(trainer=NANOTRON, memory="reserved"),
    "BigScience": Source(  # in bfloat16
        trainer=replace(SINGLE, divides_sequence=False, gradient_bytes=4), memory="device"
    ),
    "Activation recomputation": Source(trainer=SINGLE),
    "Megatron-LM SC'21": Source(trainer=replace(SINGLE, divides_sequence=False)),
    "FlagPerf": Source(  # its script divides the sequence; steps and memory of its rows say that they did not
        trainer=replace(MEGATRON, divides_sequence=False), memory="device"
    ),
    "Megatron-LM CI": Source(times_count=False),
    "Megatron-Bridge": Source(trainer=OVERLAPPING, fuses_cross_entropy=True, reduction_hidden=0.9),
    "NeMo": Source(trainer=OVERLAPPING, fuses_cross_entropy=True, reduction_hidden=0.9),
    "NVIDIA DGX Cloud": Source(trainer=OVERLAPPING, fuses_cross_entropy=True, reduction_hidden=0.9),
}
SCHEDULES = {
    "none": "1f1b", "": "1f1b", "1f1b": "1f1b", "interleaved-1f1b": "interleaved-1f1b", "zero-bubble ZB-1p": "zb-h1",
}  # fmt: skip
GPUS = {x: x.lower() for x in ("GB200", "GB300", "B200", "H100", "H200", "A100", "A800")}
GIVEN = ("source", "model", "gpu", "num_gpus", "tp", "pp", "vpp", "dp", "cp", "ep", "mbs", "gbs", "seq", "schedule")
FEWEST_RUNS = 12  # of which the nine of ten are more than one or two outliers; assumed
PRECISIONS = {"mxfp8": "float8", "fp8": "float8", "nvfp4": "float4"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run: a model on pipelines of devices."""

    decoder: Decoder
    hardware: str
    widths: Widths
    source: str
    num_devices: int  # of a pipeline
    num_microbatches: int
    microbatch_size: int
    schedule: str
    blocks: tuple[int, ...]  # of each stage
    sharding: str
    recomputes: str
    trainer: Trainer
    products: str = "bfloat16"


class NotPredictedError(Exception):
    """Why a row cannot be predicted."""


def source_of(name: str) -> Source:
    """The traits of a source by its name; those of Megatron-LM for one that is not listed."""
    return next((x for prefix, x in SOURCES.items() if name.startswith(prefix)), Source())


def case_of(row: Mapping[str, Any]) -> Case:
    """The case of a row; raises NotPredictedError for one that says too little, or what gplan has no words for."""
    for key in ("layers", "hidden", "heads", "seq", "num_gpus", "tp", "pp", "dp", "mbs", "gbs"):
        if not row[key]:
            raise NotPredictedError(f"{key} is not given")
    number = {
        key: int(float(row[key] or 1)) for key in ("layers", "tp", "pp", "vpp", "dp", "cp", "ep", "mbs", "gbs", "seq")
    }
    kind = SCHEDULES.get(str(row["schedule"]).partition(" (")[0])
    if kind is None:
        raise NotPredictedError(f"schedule {row['schedule']}")
    hardware = next((name for part, name in GPUS.items() if part in row["gpu"]), "")
    precision = next((x for part, x in PRECISIONS.items() if part in row["precision"].lower()), "bfloat16")
    if not hardware or precision == "float4":
        raise NotPredictedError(f"{row['gpu']} with {row['precision']}")
    if "LoRA" in row["notes"]:
        raise NotPredictedError("most weights are frozen")
    num_stages = number["pp"] * number["vpp"] if kind == "interleaved-1f1b" else number["pp"]
    num_microbatches, rest = divmod(number["gbs"], number["mbs"] * number["dp"])
    if rest or num_stages > number["layers"] + 2:
        raise NotPredictedError("its counts do not fit together")
    decoder, recompute = decoder_of(row), str(row["recompute"])
    return Case(
        decoder=decoder,
        hardware=hardware,
        widths=Widths(
            tensor=number["tp"],
            context=number["cp"],
            expert=number["ep"],
            data=number["dp"],
            pipeline=number["pp"],
            sequence_length=number["seq"],
        ),
        source=row["source"],
        num_devices=number["pp"],
        num_microbatches=num_microbatches,
        microbatch_size=number["mbs"],
        schedule=f"{kind}:{number['vpp']}" if kind == "interleaved-1f1b" else kind,
        blocks=blocks_of(decoder, num_stages, source_of(row["source"]).trainer, row["notes"]),
        sharding="none" if row["optimizer_sharding"] in ("none", "") else "optimizer",
        recomputes="full" if recompute.startswith("full") else "none",
        trainer=trainer_of(row),
        products=precision,
    )


def trainer_of(row: Mapping[str, Any]) -> Trainer:
    """The trainer of a row, with what its notes say of attention."""
    trainer = source_of(row["source"]).trainer
    if row["recompute"].startswith("selective"):
        trainer = replace(trainer, recomputes_scores=True)
    return replace(trainer, stores_scores=True) if "attention-backend=unfused" in row["notes"] else trainer


def decoder_of(row: Mapping[str, Any]) -> Decoder:
    """The model of a row; the vocabulary is padded as Megatron-LM pads it."""
    source, number = source_of(row["source"]), lambda key: int(float(row[key] or 0))
    family = next((x for part, x in FAMILIES.items() if re.search(part, row["model"].lower())), {})
    notes = row["notes"].lower()
    vocabulary = int(float(re.sub(r"[^\d.].*", "", row["vocab"]) or family.get("vocab_size", 50257)))
    multiple = 1 if source.trainer.counts_blocks else PADDING * number("tp")
    keys: dict[str, Any] = {
        **family,
        "hidden_size": number("hidden"),
        "num_hidden_layers": number("layers"),
        "intermediate_size": number("ffn") or 4 * number("hidden"),
        "num_attention_heads": number("heads"),
        "num_key_value_heads": number("kv_heads"),
        "vocab_size": -(-vocabulary // multiple) * multiple,
        "n_routed_experts": number("experts"),
        "num_experts_per_tok": number("topk"),
        "moe_intermediate_size": number("moe_ffn"),
        **source.decoder,
    }
    if keys.get("is_gated") is False:
        keys["learned_positions"] = number("seq")
    if "tied embeddings" in notes or "untie" in notes or "untied" in notes:
        keys["tie_word_embeddings"] = "untie" not in notes
    if "swiglu" in notes or "swiglu" in row["model"]:
        keys["is_gated"] = True
    return Decoder(**keys)


def blocks_of(decoder: Decoder, num_stages: int, trainer: Trainer, notes: str) -> tuple[int, ...]:
    """How many blocks each stage has, as the trainer cuts them, or as a row's own times per stage say."""
    count = decoder.num_hidden_layers
    if times := re.search(r"layers redistributed.*?F us per stage ([\d ]+)", notes):
        found = [int(x) for x in times[1].split()]
        block = min(found) / (count // num_stages)
        blocks = [round(x / block) for x in found[:-1]]
        return (*blocks, count - sum(blocks))
    if trainer.counts_blocks:
        return layers_by_cost(decoder, num_stages)
    for ends in ((0, 0), (1, 1), (0, 1)):  # as if embedding and head were a block
        if (count + sum(ends)) % num_stages == 0:
            share = (count + sum(ends)) // num_stages
            return (share - ends[0], *[share] * (num_stages - 2), share - ends[1]) if num_stages > 1 else (count,)
    share, more = divmod(count, num_stages)
    return tuple(share + (i < more) for i in range(num_stages))


@lru_cache
def hardware_of(name: str) -> Hardware:
    """The device of a run."""
    if name == "b200" and B200_FILE.exists():
        return described_hardware(read_system_file(B200_FILE), name=name, place=str(B200_FILE))
    return load_hardware(name)


@cache
def predict(case: Case, *, reserves: bool = False) -> Plan:
    """The plan that the run is, with its predicted step and memory; with `reserves` what allocators reserve too."""
    source = source_of(case.source)
    made = DecoderProfile(
        name="published",
        decoder=case.decoder,
        widths=case.widths,
        hardware=hardware_of(case.hardware),
        fuses_cross_entropy=source.fuses_cross_entropy,
        divides_state=case.widths.replicas == 1,
        recomputed=frozenset(range(case.decoder.num_hidden_layers if case.recomputes == "full" else 0)),
        trainer=case.trainer,
        products=case.products,
        reduction_hidden=source.reduction_hidden,
    )
    profile = made.profile((case.microbatch_size,))
    filled = () if case.trainer.counts_blocks else (0, len(case.blocks) - 1)  # by embedding and head
    stages = [x for i, x in enumerate(case.blocks) if x or i in filled]  # one with nothing is no stage
    ends = np.cumsum(stages)[:-1]
    schedule = case.schedule if len(stages) == len(case.blocks) else "1f1b"
    request = PlanRequest(
        num_devices=case.num_devices if len(stages) == len(case.blocks) else len(stages),
        num_microbatches=case.num_microbatches,
        microbatch_size=case.microbatch_size,
        schedule=schedule,
        num_replicas=case.widths.replicas,
        sharding=case.sharding if case.widths.replicas > 1 else "none",
        memory_bytes=10**15,
        constraints=Constraints(cut_after=tuple(profile.layers[end].name for end in ends)),
    )
    plan = best_plan(problem_of(profile, request))
    return replace(plan, reserved_bytes=device_reserved_bytes(plan, profile)) if reserves else plan


def step_s(row: Mapping[str, Any]) -> float:
    """The measured seconds of a step."""
    value, unit = float(row["value"]), row["unit"]
    if unit in ("ms", "s"):
        return value / (1000 if unit == "ms" else 1)
    samples, gpus = float(row["gbs"]), float(row["num_gpus"])
    tokens = samples * float(row["seq"])
    if unit == "tokens/s/GPU":
        return tokens / gpus / value
    if unit == "samples/s/GPU":
        return samples / gpus / value
    layers, hidden, vocabulary = (float(row[x]) for x in ("layers", "hidden", "vocab"))
    passes = 96 if "WITH recompute" in row["notes"] else 72  # Narayanan et al. 2021, equation 3
    flops = passes * tokens * layers * hidden**2
    flops *= 1 + float(row["seq"]) / (6 * hidden) + vocabulary / (16 * layers * hidden * passes / 96)
    rate = 312e12 * value / 100 if unit.startswith("%") else 1e12 * value
    return flops / gpus / rate


def compared(rows: pd.DataFrame) -> pd.DataFrame:
    """Predicted beside published for each row; `reason` says why one was not predicted."""
    found = []
    for row in rows.to_dict("records"):
        line = {key: row[key] for key in GIVEN}
        line["kind"] = MIXTURE if float(row["experts"] or 0) else DENSE
        try:
            case = case_of(row)
            counter, unit = source_of(row["source"]).memory, 1e9 if source_of(row["source"]).has_gigabytes else GIB
            stated = re.search(r"max.reserved (GiB|MiB) ([\d.]+)", row["notes"])
            plan = predict(case, reserves=bool(stated) or counter != "allocated")
            reserved = plan.reserved_bytes or [x / RESERVED_SHARE for x in plan.device_peak_bytes]
            peaks = plan.device_peak_bytes if counter == "allocated" else reserved
            peak = peaks[-1] if "LAST rank" in row["notes"] else max(peaks)
            peak += CONTEXT_BYTES * (counter == "device")
            line |= {"measured_s": step_s(row), "predicted_s": plan.prediction.step_s, "predicted_gib": peak / GIB}
            line |= {"measured_gib": float(row["peak_memory_gib"] or "nan") * unit / GIB, "reason": ""}
            if stated:
                line |= {"predicted_reserved_gib": max(reserved) / GIB}
                line |= {"measured_reserved_gib": float(stated[2]) / (1024 if stated[1] == "MiB" else 1)}
        except (NotPredictedError, GplanError, ValueError) as error:
            line["reason"] = str(error)[:90]
        found.append(line)
    made = pd.DataFrame(found)
    made["error"] = made.predicted_s / made.measured_s - 1
    made["memory_error"] = made.predicted_gib / made.measured_gib - 1
    if "measured_reserved_gib" in made:
        made["reserved_error"] = made.predicted_reserved_gib / made.measured_reserved_gib - 1
    return made


def orders(made: pd.DataFrame) -> pd.DataFrame:
    """Spearman's rank correlation and the regret of each group of one model on one number of GPUs."""
    found = []
    predicted = made[made.reason == ""]
    for key, group in predicted.groupby(["source", "model", "gpu", "num_gpus", "seq", "gbs"]):
        if len(group) > 3:
            chosen = group.measured_s[group.predicted_s.idxmin()]
            found.append({
                "source": key[0], "model": key[1], "num_gpus": key[3], "rows": len(group),
                "spearman": group.predicted_s.rank().corr(group.measured_s.rank()),
                "regret": chosen / group.measured_s.min() - 1,
            })  # fmt: skip
    return pd.DataFrame(found, columns=["source", "model", "num_gpus", "rows", "spearman", "regret"])


def tables(made: pd.DataFrame) -> Iterator[str]:
    """The lines of both tables: errors by source, and the order within groups."""

    def texts(errors: pd.Series[float]) -> list[str]:
        known = errors.dropna()
        if known.empty:
            return [""] * 5
        parts = [known.median(), *known.abs().quantile([0.5, 0.25, 0.75, 0.9])]
        return [percent_text(float(x), signed=i == 0) for i, x in enumerate(parts)]

    ordered, lines = orders(made), []
    for source, group in made.groupby("source", sort=False):
        own = ordered[ordered.source == source]
        ranks = ["", ""] if own.empty else [f"{own.spearman.median():.2f}", percent_text(float(own.regret.median()))]
        memory = [texts(group.memory_error)[i] for i in (0, 1, 4)]
        reserved = [texts(group.reserved_error)[i] for i in (1, 4)] if "reserved_error" in made else ["", ""]
        counted = f"{(group.reason == '').sum()} of {len(group)}"
        lines.append([source, counted, *texts(group.error), *memory, *reserved, len(own) or "", *ranks])
    heads = [
        "source",
        "predicted",
        "step: median error",
        "median size",
        "first quartile",
        "third",
        "nine of ten within",
    ]
    heads += [
        "memory: median error",
        "median size",
        "nine of ten within",
        "reserved: median size",
        "nine of ten within",
    ]
    heads += ["groups", "Spearman", "regret"]
    yield from markdown(heads, lines)
    yield ""
    reasons = made[made.reason != ""].groupby(["source", "reason"]).size()
    yield from markdown(["source", "not predicted", "rows"], [[*key, count] for key, count in reasons.items()])  # type: ignore[misc]
    yield ""
    rows = [
        [x.source, x.model, x.num_gpus, x.rows, f"{x.spearman:.2f}", percent_text(x.regret)]
        for x in ordered.itertuples()
    ]
    yield from markdown(["source", "model", "GPUs", "rows", "Spearman", "regret"], rows)


def expected(made: pd.DataFrame) -> str:
    """The file of expected errors, in TOML: by trainer, by kind of model in it, and by GPU in that."""
    known = made[(made.reason == "") & made.source.map(lambda x: source_of(x).times_count)]
    trainers = known.source.map(lambda x: source_of(x).trainer.name)
    gpus = known.gpu.map(lambda x: next(name for part, name in GPUS.items() if part in x))
    lines = list[str]()
    for (trainer, kind), of_kind in known.groupby([trainers, "kind"]):
        for gpu, group in ({ALL: of_kind} | {str(x): y for x, y in of_kind.groupby(gpus)}).items():
            step, memory = group.error.abs(), group.memory_error.dropna().abs()
            if len(step) < FEWEST_RUNS:
                continue
            lines += [f'[{trainer}."{kind}"."{gpu}"]', f"num_runs = {len(group)}"]
            lines += [f"step_{name} = {step.quantile(x):.4f}" for name, x in (("half", 0.5), ("most", 0.9))]
            if len(memory) >= FEWEST_RUNS:
                lines.append(f"num_memories = {len(memory)}")
                lines += [f"memory_{name} = {memory.quantile(x):.4f}" for name, x in (("half", 0.5), ("most", 0.9))]
            lines.append("")
    return "\n".join(lines)


def replayed(rows: pd.DataFrame) -> list[float]:
    """Errors of the steps of 1F1B, simulated from the forward and backward of each stage where a row states them."""
    errors = list[float]()
    for row in rows[rows.schedule == "1f1b"].to_dict("records"):
        stated = [re.search(rf"{way} us per stage ([\d ]+)", row["notes"]) for way in "FB"]
        forwards, backwards = ([1e-6 * float(y) for y in x[1].split()] if x else [] for x in stated)
        if not forwards or len(forwards) != len(backwards):
            continue
        none: Any = dict.fromkeys(("recompute_s", "optimizer_s", "activation_s", "gradient_s"), 0.0)
        none |= {"activation_bytes": 0, "gradient_bytes": 0}
        costs = [StageCost(forward_s=x, backward_s=y, **none) for x, y in zip(forwards, backwards, strict=True)]
        count = int(float(row["gbs"]) / float(row["mbs"]) / float(row["dp"]))
        schedule = make_schedule("1f1b", num_devices=len(costs), num_microbatches=count)
        errors.append(step_and_bubble(schedule, costs, recompute="never")[0] / step_s(row) - 1)
    return errors


def main() -> None:
    """Print the tables; with `--report` also write them with every row."""
    parser = options_of(__doc__, "published-runs")
    parser.add_argument("--data", type=Path, default=DATA, help="file with the rows")
    parser.add_argument("--source", default="", help="only sources whose names have this")
    parser.add_argument("--rows", action="store_true", help="print each row too")
    parser.add_argument("--report", action="store_true", help="write README.md and rows.csv of --output")
    options: argparse.Namespace = parser.parse_args()
    if not options.data.exists():
        parser.error(f"{options.data} is not there; name a file of rows with --data")
    rows = pd.read_csv(options.data, dtype=str, keep_default_na=False)
    made = compared(rows[rows.source.str.contains(options.source, regex=False)])
    if made.empty:
        raise UsageError(f"no source has {options.source!r} in its name")
    errors = replayed(rows)
    simulated = ["", f"1F1B simulated from published times of stages: {len(errors)} rows"]
    if errors:
        least, most = (percent_text(x, signed=True) for x in (min(errors), max(errors)))
        simulated[1] += f", errors of the step from {least} to {most}."
    if options.rows:
        shown = made.drop(columns=["source", "gpu", "reason"]) if options.source else made
        print(shown.round(3).to_string())
    if options.report:
        readme = options.output / "README.md"
        before = readme.read_text().partition("<!-- tables -->")[0] if readme.exists() else ""
        made.round(4).to_csv(options.output / "rows.csv", index=False)
        EXPECTED.write_text(expected(made))
        write_report(options.output, [before + "<!-- tables -->", *tables(made), *simulated])
    else:
        print(*tables(made), *simulated, sep="\n")


if __name__ == "__main__":
    main()
