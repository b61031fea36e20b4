"""Published GPU runs: rows become cases, cut as their trainer cuts them; the published ones within bounds, where present."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from benchmarks import published_runs
from gplan_profiler.analytic.trainers import NANOTRON

COLUMNS = [
    "source",
    "model",
    "layers",
    "hidden",
    "ffn",
    "heads",
    "kv_heads",
    "vocab",
    "seq",
    "experts",
    "topk",
    "moe_ffn",
    "gpu",
    "num_gpus",
    "tp",
    "pp",
    "vpp",
    "dp",
    "cp",
    "ep",
    "mbs",
    "gbs",
    "schedule",
    "recompute",
    "precision",
    "optimizer_sharding",
    "metric",
    "value",
    "unit",
    "peak_memory_gib",
    "notes",
]
ROW = {
    "source": "Megatron-Bridge", "model": "tiny", "layers": "6", "hidden": "64", "ffn": "128", "heads": "8", "kv_heads": "2",
    "vocab": "500", "seq": "256", "gpu": "H100", "num_gpus": "8", "tp": "2", "pp": "2", "vpp": "1.0", "dp": "2", "cp": "1",
    "ep": "1", "mbs": "2", "gbs": "16", "schedule": "1f1b", "precision": "BF16", "value": "1000", "unit": "tokens/s/GPU",
}  # fmt: skip


def row(**values: str) -> dict[str, Any]:
    return dict.fromkeys(COLUMNS, "") | ROW | values


def test_rows_are_cases() -> None:
    case = published_runs.case_of(row(cp="2", num_gpus="16", precision="MXFP8", recompute="full"))
    assert (case.widths.tensor, case.widths.context, case.widths.replicas) == (2, 2, 4)
    assert (case.num_microbatches, case.blocks, case.products, case.recomputes) == (4, (3, 3), "float8", "full")
    assert case.decoder.vocab_size == 512
    experts = published_runs.case_of(row(model="DeepSeek-V3 small", experts="8", topk="2", moe_ffn="32", ep="2"))
    assert (experts.decoder.routed_experts, experts.decoder.kv_lora_rank, experts.decoder.shared_width) == (8, 512, 32)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"mbs": ""}, "mbs is not given"),
        ({"schedule": "1f1b + vocab-1"}, "schedule"),
        ({"gpu": "abacus"}, "abacus with BF16"),
        ({"gbs": "15"}, "counts do not fit"),
    ],
)
def test_rows_that_cannot_be_predicted_say_why(values: dict[str, str], reason: str) -> None:
    made = published_runs.compared(pd.DataFrame([row(**values), row()]))
    assert reason in made.reason[0] and made.reason[1] == ""
    assert made.predicted_s[1] > 0 and made.measured_s[1] == pytest.approx(16 * 256 / 8 / 1000)


def test_trainers_cut_layers_in_their_own_way() -> None:
    def cut(layers: int, num_stages: int, notes: str = "", **keys: Any) -> tuple[int, ...]:
        decoder = published_runs.decoder_of(row(layers=str(layers), vocab="2048", hidden="64", ffn="64"))
        trainer = keys.get("trainer", published_runs.MEGATRON)
        return published_runs.blocks_of(decoder, num_stages, trainer, notes)

    assert cut(22, 8) == (2, *[3] * 6, 2)
    assert cut(7, 2) == (4, 3)
    times = "layers redistributed, 0 on the last stage; F us per stage 20 30 30 90"
    assert cut(8, 4, times) == (2, 3, 3, 0)
    # a block has 7 * 64^2 parameters in products, the head 32 * 64^2: 4.6 blocks
    assert cut(8, 2, trainer=NANOTRON) == (7, 1 + 2)
    assert cut(8, 4, trainer=NANOTRON) == (4, 3, 1 + 1, 1)  # the blocks end before the third quarter does
    assert cut(2, 8, trainer=NANOTRON) == (1, 1, 1, 1, 0, 0, 0, 0)  # 46 of 5.75 each: head and loss are on the fourth


def test_peaks_in_units_of_ten_to_the_ninth() -> None:
    rows = [row(source=x, peak_memory_gib="30", tp="1", dp="4") for x in ("Zero Bubble paper", "Megatron-Bridge")]
    made = published_runs.compared(pd.DataFrame(rows))
    assert list(made.measured_gib) == pytest.approx([30e9 / 2**30, 30])


def test_groups_have_an_order_and_a_regret() -> None:
    rows = pd.DataFrame([row(tp=tp, dp=dp, value=value) for tp, dp, value in (
        ("1", "4", "900"), ("2", "2", "700"), ("4", "1", "300"), ("8", "1", "20"))])  # fmt: skip
    rows.loc[3, "pp"] = "1"
    made = published_runs.compared(rows)
    found = published_runs.orders(made).iloc[0]
    assert (found.rows, found.regret) == (4, 0)
    assert found.spearman > 0.5


@pytest.mark.skipif(
    not published_runs.DATA.exists(),
    reason=f"{published_runs.DATA} is not there; GPLAN_REFERENCE_DATA names its folder's parent",
)
def test_published_rows() -> None:
    rows = pd.read_csv(published_runs.DATA, dtype=str, keep_default_na=False)
    made = published_runs.compared(rows[rows.source.str.startswith("SimuMax")])
    assert len(made) == 22 and (made.reason == "").all()
    assert made.error.abs().mean() <= 0.06
    assert made.memory_error.abs().median() <= 0.01
