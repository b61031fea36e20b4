"""Published GPU runs: rows of a made-up folder are read and predicted; the published ones within the aims, where present."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from benchmarks import gpu_runs
from gplan.cost.stage_table import StageTable
from gplan_profiler.analytic.decoder_config import Widths, load_decoder
from gplan_profiler.analytic.decoder_profile import DecoderProfile
from gplan_profiler.analytic.hardware import load_hardware
from tests.benchmarks.test_simumax import SYSTEM

COLUMNS = "case,model,layers,tensor_parallel,pipeline,data_parallel,microbatches,expert_parallel,recompute_layers"
ROWS = ("tiny_mbs1_cef,tiny,4,1,2,2,4,1,0", "tiny_mbs2,tiny,4,1,1,4,4,1,0", "experts,experts,4,1,2,2,4,2,1")
SIZES = {
    "hidden_size": 64,
    "head_num": 8,
    "kv_head_num": 2,
    "intermediate_size": 128,
    "vocab_size": 500,
    "layer_num": 9,
}
MOST_MEMORY, MOST_STEP = 0.015, 0.06


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    (place / "b200_efficiency.json").write_text(json.dumps(SYSTEM))
    (place / "tiny.json").write_text(json.dumps(SIZES))
    (place / "experts.json").write_text(json.dumps({**SIZES, "expert_num": 4, "topk": 2, "dense_layers": 1}))
    (place / "tp1_pp2_dp2_mbs1.json").write_text(json.dumps({"seq_len": 32, "enable_recompute": True}))
    (place / "b200_made.csv").write_text("\n".join([COLUMNS, *ROWS]) + "\n")
    return place


def test_rows_are_cases(folder: Path) -> None:
    tiny, larger, experts = (case for _, case, _ in gpu_runs.cases(folder))
    assert (tiny.sequence_length, tiny.num_stages, tiny.fuses_cross_entropy, tiny.recomputed) == (32, 2, True, 0)
    assert (larger.microbatch_size, larger.num_stages, larger.fuses_cross_entropy) == (2, 1, False)
    assert (experts.expert, experts.recomputed, experts.decoder.routed_experts) == (2, 1, 4)
    assert experts.blocks == [2, 2]
    assert tiny.decoder.vocab_size == 512


def test_rows_are_predicted_with_each_part_of_memory(folder: Path) -> None:
    rows = [(row, gpu_runs.predict(case, hardware)) for row, case, hardware in gpu_runs.cases(folder)]
    assert [plan.num_stages for _, plan in rows] == [2, 1, 2]
    assert all(plan.prediction.step_s > 0 for _, plan in rows)
    text = gpu_runs.as_text(rows)
    assert "| tiny_mbs1_cef | 1 |" in text
    first = rows[0][1].stages[0].memory
    assert sum(getattr(first, f"{x}_bytes") for x in gpu_runs.PARTS) == first.peak_bytes


@pytest.mark.skipif(
    not gpu_runs.DATA.exists(), reason=f"{gpu_runs.DATA} is not there; GPLAN_REFERENCE_DATA names its parent"
)
def test_published_rows() -> None:
    for row, case, hardware in gpu_runs.cases(gpu_runs.DATA):
        errors = {
            name: error for name, (_, _, error) in gpu_runs.compared(row, gpu_runs.predict(case, hardware)).items()
        }
        assert abs(errors.pop("step, ms")) <= MOST_STEP
        assert all(abs(x) <= MOST_MEMORY for x in errors.values())
    assert len(pd.read_csv(next(gpu_runs.DATA.glob("*.csv")))) > 0


def test_a_stage_holds_one_empty_gradient_of_each_shape() -> None:
    decoder = load_decoder("llama3-70b", {"num_hidden_layers": 4})
    alone = DecoderProfile(name="llama", decoder=decoder, widths=Widths(), hardware=load_hardware("h100"))
    made = gpu_runs.with_empty_gradients(alone.profile((1,)), alone.parts())
    bytes_of = [StageTable(made, 4).row_parts(*x) for x in ((0, 2), (0, 3), (0, 6))]
    of_shapes = 2 * (8192 * 10240 + 8192 * 8192 + 8192 * 57344 + 28672 * 8192)
    for stage, (first, end) in zip(bytes_of, ((0, 2), (0, 3), (0, 6)), strict=True):
        assert stage.weight == sum(x.weight_bytes for x in made.layers[first:end]) + of_shapes
