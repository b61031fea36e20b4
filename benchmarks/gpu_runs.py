"""Published pipeline runs on GPUs, predicted from the model's configuration and the device's efficiency file alone.

    python benchmarks/gpu_runs.py                          the rows of ../shared/data/gpu_runs; a second or two
    python benchmarks/gpu_runs.py --data FOLDER            other rows of the same source
    python benchmarks/gpu_runs.py --report                 writes reports/gpu-runs/README.md too
    python benchmarks/gpu_runs.py --left-out               errors of shares by shape, each measured one left out in turn

The folder holds rows (*.csv), a model file by the name in each row (llama3-70b.json), strategy files
(tp1_pp2_dp4_mbs1.json) and the efficiencies measured on the device (*_efficiency.json, whose name begins as that of the
rows). They are the files of MooreThreads/SimuMax, whose runs are Megatron-LM's with Transformer Engine. A row has the
columns model, layers, tensor_parallel, pipeline, data_parallel, microbatches and step_ms; these may be there or not:
expert_parallel, microbatch_size, sequence_length, chunks (stages of a device), recompute_layers (of each stage), strategy
(a file's name), and the peaks in MB of 2^20 bytes. A case whose name has "cef" fuses the cross-entropy.

Nothing is fitted to the rows. The profile comes from gplan_profiler/analytic/decoder_profile.py, the plan from the cost model
with the replicas' sharding, as for `gplan layout` and `gplan balance`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec
import pandas as pd
from simumax import read_system_file
from suite import DATA as PUBLISHED
from suite import error_text, markdown, options_of

import gplan
from gplan.core import Constraints, Plan, Profile, SharedWeight
from gplan.core.errors import FileError
from gplan.core.units import percent_text
from gplan_profiler.analytic.decoder_config import Decoder, Widths
from gplan_profiler.analytic.decoder_kernels import ELEMENT, Part
from gplan_profiler.analytic.decoder_profile import DecoderProfile
from gplan_profiler.analytic.hardware import Hardware, described_hardware
from gplan_profiler.analytic.shapes import AttentionShape, MatmulShape, ShapeTable

DATA = PUBLISHED / "gpu_runs"
MIB = 2**20
PADDING = 128  # Megatron-LM pads the vocabulary to a multiple of this for each tensor-parallel rank
PARTS = ("weight", "gradient", "optimizer", "activation", "workspace", "buffer")


class ModelFile(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a model, by the names of the source."""

    hidden_size: int
    head_num: int
    intermediate_size: int
    vocab_size: int
    layer_num: int
    kv_head_num: int = 0
    head_size: int | None = None
    expert_num: int = 0
    topk: int = 0
    dense_layers: int = 0
    moe_ffn_hidden_size: int = 0
    moe_shared_expert_intermediate_size: int | None = None
    attention_type: str = "mha"
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_head_dim: int = 0
    qk_pos_emb_head_dim: int = 0
    v_head_dim: int = 0

    def decoder(self, num_layers: int, *, tensor: int) -> Decoder:
        """The same by the names of Hugging Face, with fewer layers and the vocabulary padded."""
        is_latent, multiple = self.attention_type == "mla", PADDING * tensor
        expert_width = self.moe_ffn_hidden_size or self.intermediate_size
        return Decoder(
            hidden_size=self.hidden_size,
            num_hidden_layers=num_layers,
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.head_num,
            num_key_value_heads=self.kv_head_num or self.head_num,
            head_dim=self.head_size,
            vocab_size=-(-self.vocab_size // multiple) * multiple,
            q_lora_rank=(self.q_lora_rank or 0) if is_latent else 0,
            kv_lora_rank=(self.kv_lora_rank or 0) if is_latent else 0,
            qk_nope_head_dim=self.qk_head_dim if is_latent else 0,
            qk_rope_head_dim=self.qk_pos_emb_head_dim if is_latent else 0,
            v_head_dim=self.v_head_dim if is_latent else 0,
            n_routed_experts=self.expert_num if self.expert_num > 1 else 0,
            num_experts_per_tok=self.topk,
            moe_intermediate_size=expert_width if self.expert_num > 1 else 0,
            n_shared_experts=(self.moe_shared_expert_intermediate_size or 0) // expert_width,
            first_k_dense_replace=self.dense_layers,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run: a model on pipelines of devices."""

    name: str
    decoder: Decoder
    num_devices: int  # of a pipeline
    num_replicas: int
    num_microbatches: int
    microbatch_size: int = 1
    sequence_length: int = 4096
    tensor: int = 1
    expert: int = 1
    recomputed: int = 0  # of the first blocks of each stage
    num_chunks: int = 1  # stages of a device, interleaved
    fuses_cross_entropy: bool = True
    first_blocks: int | None = None  # of the first stage; None: as many as on the others
    last_blocks: int | None = None

    @property
    def num_stages(self) -> int:
        """Of a pipeline."""
        return self.num_devices * self.num_chunks

    @property
    def blocks(self) -> list[int]:
        """Of each stage: equally many on those for which no number is given."""
        if self.num_stages == 1:
            return [self.decoder.num_hidden_layers]
        given = [self.first_blocks, *[None] * (self.num_stages - 2), self.last_blocks]
        share, rest = divmod(self.decoder.num_hidden_layers - sum(x or 0 for x in given), given.count(None) or 1)
        if rest:
            raise FileError(f"{self.name}: the blocks cannot be divided equally among {self.num_stages} stages")
        return [share if x is None else x for x in given]


def predict(case: Case, hardware: Hardware) -> Plan:
    """The plan that the run is, with its predicted step and memory."""
    ends = [1 + sum(case.blocks[: i + 1]) for i in range(case.num_stages)]
    starts = [1, *ends[:-1]]
    made = DecoderProfile(
        name=case.name,
        decoder=case.decoder,
        widths=Widths(
            tensor=case.tensor, expert=case.expert, data=case.num_replicas, sequence_length=case.sequence_length
        ),
        hardware=hardware,
        fuses_cross_entropy=case.fuses_cross_entropy,
        divides_state=case.num_replicas == 1,
        recomputed=frozenset(start - 1 + i for start in starts for i in range(case.recomputed)),
    )
    profile = with_empty_gradients(made.profile((case.microbatch_size,)), made.parts())
    return gplan.balance(
        profile,
        num_devices=case.num_devices,
        num_microbatches=case.num_microbatches,
        microbatch_size=case.microbatch_size,
        schedule="1f1b" if case.num_chunks == 1 else f"interleaved-1f1b:{case.num_chunks}",
        num_replicas=case.num_replicas,
        sharding="optimizer" if case.num_replicas > 1 else "none",
        memory_bytes=10**15,
        constraints=Constraints(cut_after=tuple(profile.layers[end - 1].name for end in ends[:-1])),
    )


def with_empty_gradients(profile: Profile, parts: Sequence[Part]) -> Profile:
    """With empty gradients as weights that several layers share: a stage holds one of each shape of a product's weight.

    Where products add to the gradients themselves, autograd gets such a bfloat16 tensor of Transformer Engine in their
    place (`get_dummy_wgrad`).
    """
    last, users_of = len(parts) - 1, dict[tuple[int, int], tuple[int, ...]]()
    for layer, part in enumerate(parts):
        for shape in dict.fromkeys(part.weights):
            users_of[shape] = (*users_of.get(shape, ()), layer)
    empty = [
        SharedWeight(
            name=f"empty gradient of {shape[0]} x {shape[1]}",
            layers=users if len(users) > 1 else (users[0], last),
            num_parameters=0,
            weight_bytes=ELEMENT * prod(shape),
            gradient_bytes=0,
        )
        for shape, users in users_of.items()
    ]
    return replace(profile, shared_weights=(*profile.shared_weights, *empty))


def hardware_of(path: Path) -> Hardware:
    """The device of a system file."""
    return described_hardware(read_system_file(path), name=path.stem, place=str(path))


def cases(folder: Path) -> Iterator[tuple[dict[str, Any], Case, Hardware]]:
    """Each row of a folder with its case and its device."""
    for path in sorted(folder.glob("*.csv")):
        device = path.stem.split("_")[0]
        hardware = hardware_of(next(iter(folder.glob(f"{device}*_efficiency.json")), folder / "efficiency.json"))
        for row in pd.read_csv(path).to_dict("records"):
            found = {str(key): value for key, value in row.items() if not pd.isna(value)}
            yield found, case_of(found, folder), hardware


def case_of(row: dict[str, Any], folder: Path) -> Case:
    """The case of a row; its strategy file says what the row does not."""
    name, tensor, data = str(row["case"]), int(row.get("tensor_parallel", 1)), int(row["data_parallel"])
    size = int(row.get("microbatch_size", _number_after(name, "mbs", 1)))
    usual = f"tp{tensor}_pp{int(row['pipeline'])}_dp{data}_mbs{size}"
    strategy_path = folder / f"{str(row.get('strategy', usual)).removesuffix('.json')}.json"
    strategy = msgspec.json.decode(strategy_path.read_bytes()) if strategy_path.exists() else {}
    granularity = strategy.get("recompute_granularity")
    if strategy.get("enable_recompute") and granularity not in (None, "full_block"):
        raise FileError(f"{strategy_path} recomputes {granularity}; expected full_block, or nothing")
    recomputed = strategy.get("recompute_layer_num", 0) if granularity else 0
    model = msgspec.json.decode((folder / f"{row['model']}.json").read_bytes(), type=ModelFile)
    return Case(
        name=name,
        decoder=model.decoder(int(row["layers"]), tensor=tensor),
        num_devices=int(row["pipeline"]),
        num_replicas=data,
        num_microbatches=int(row["microbatches"]),
        microbatch_size=size,
        sequence_length=int(row.get("sequence_length", strategy.get("seq_len", 4096))),
        tensor=tensor,
        expert=int(row.get("expert_parallel", strategy.get("ep_size", _number_after(name, "ep", 1)))),
        recomputed=int(row.get("recompute_layers", recomputed)),
        num_chunks=int(row.get("chunks", strategy.get("interleaving_size", _number_after(name, "vp", 1)))),
        fuses_cross_entropy="cef" in name.split("_") or bool(strategy.get("cross_entropy_loss_fusion")),
        first_blocks=strategy.get("num_layers_in_first_pipeline_stage"),
        last_blocks=strategy.get("num_layers_in_last_pipeline_stage"),
    )


def _number_after(name: str, word: str, default: int) -> int:
    """The number that follows a word in a case's name, as in "ep4"."""
    found = [x.removeprefix(word) for x in name.split("_") if x.startswith(word)]
    return next((int(x) for x in found if x.isdecimal()), default)


def compared(row: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """Predicted beside published: the step, and the peaks of the first and the last stage."""
    peaks = [x / MIB for x in plan.device_peak_bytes]
    pairs = {
        "step, ms": (1000 * plan.prediction.step_s, row.get("step_ms")),
        "first stage, MiB": (peaks[0], row.get("peak_allocated_mb_first_stage")),
        "last stage, MiB": (peaks[-1], row.get("peak_allocated_mb_last_stage")),
    }
    return {name: (one, other, one / other - 1 if other else None) for name, (one, other) in pairs.items()}


def as_text(rows: list[tuple[dict[str, Any], Plan]]) -> str:
    """The tables: errors, then each part of the memory of each stage, then its seconds."""
    stages = [(row["case"], stage) for row, plan in rows for stage in plan.stages]
    errors = (
        [row["case"], *(_cell(*x, unit=n.split(", ")[1]) for n, x in compared(row, plan).items())] for row, plan in rows
    )
    parts = (
        [case, x.index, *(f"{getattr(x.memory, f'{part}_bytes') / MIB:,.0f}" for part in PARTS),
         f"{x.memory.peak_bytes / MIB:,.0f}", x.memory.moment]
        for case, x in stages
    )  # fmt: skip
    taken = ("forward_s", "backward_s", "all_reduce_s", "optimizer_s")
    seconds = ([case, x.index, *(f"{1000 * getattr(x.cost, name):,.1f} ms" for name in taken)] for case, x in stages)
    lines = [
        *markdown(
            ["case", *(f"{x}: predicted, published, error" for x in ("step", "first stage", "last stage"))], errors
        ),
        "",
        *markdown(["case", "stage", *PARTS, "sum", "at"], parts),
        "",
        *markdown(
            ["case", "stage", "forward", "backward", "gradients and weights between replicas", "update"], seconds
        ),
    ]
    return "\n".join(lines) + "\n"


def left_out(table: ShapeTable) -> Iterator[str]:
    """Errors of the share of each shape by the others, for products and attention; beside, those of the mean of all."""
    for kind in (MatmulShape, AttentionShape):
        known = {shape: share for shape, share in table.shares.items() if isinstance(shape, kind)}
        errors, of_mean = list[float](), list[float]()
        for shape, share in known.items():
            others = {x: y for x, y in known.items() if x != shape}
            found = ShapeTable(others).share(shape)
            if found is not None:
                errors.append(abs(found / share - 1))
                of_mean.append(abs(fmean(others.values()) / share - 1))
        figures = [percent_text(f(x)) for x in (errors, of_mean) for f in (fmean, median)]
        yield (
            f"{len(errors)} of {kind.__name__}: mean error {figures[0]}, median {figures[1]}; one number for all: "
            f"mean {figures[2]}, median {figures[3]}"
        )


def _cell(predicted: float, published: float | None, error: float | None, *, unit: str) -> str:
    if published is None or error is None:
        return f"{predicted:,.0f} {unit}"
    return f"{predicted:,.1f} {unit}, {published:,.1f} {unit}, **{error_text(error)}**"


def main() -> None:
    """Print the tables; with `--report` also write them beside how they were made."""
    parser = options_of(__doc__, "gpu-runs")
    parser.add_argument("--data", type=Path, default=DATA, help="folder with the rows")
    parser.add_argument("--report", action="store_true", help="write the tables into README.md of --output")
    parser.add_argument("--left-out", action="store_true", help="errors of the interpolation between shapes instead")
    options = parser.parse_args()
    if options.left_out:
        for path in options.data.glob("*_efficiency.json"):
            print(path.name, *left_out(hardware_of(path).shapes), sep="\n")
        return
    rows = [(row, predict(case, hardware)) for row, case, hardware in cases(options.data)]
    if not rows:
        parser.error(f"{options.data} has no rows (*.csv); name the folder with --data")
    text = as_text(rows)
    print(text)
    if options.report:
        path = options.output / "README.md"
        head, _, rest = path.read_text().partition("<!-- tables -->\n")
        path.write_text(f"{head}<!-- tables -->\n{text}<!-- end -->{rest.partition('<!-- end -->')[2]}")


if __name__ == "__main__":
    main()
