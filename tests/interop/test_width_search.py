"""The search over widths: every setting that counts allow, bounds that hold, and the same best plan as without bounds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gplan.core.errors import NoPlanError, UsageError
from gplan.interop.export.exporters import export
from gplan.interop.layouts import read_layout
from gplan.interop.width_search import WidthSearch, layout_of
from gplan_profiler.analytic.decoder_config import Widths, load_decoder
from gplan_profiler.analytic.hardware import load_hardware
from tests.interop.test_receivers import gplan_exits

SMALL = {"num_hidden_layers": 6, "hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 8}


def search(**fields: Any) -> WidthSearch:
    given: dict[str, Any] = {
        "name": "small", "decoder": load_decoder("llama3-8b", SMALL), "hardware": load_hardware("a100"), "num_devices": 4,
        "batch_size": 16, "sequence_length": 1024, "receiver": "megatron", "time_limit_s": 60.0,
    }  # fmt: skip
    return WidthSearch(**{**given, **fields})


def test_settings_use_every_device_and_every_sample() -> None:
    choices = list(search().choices())
    assert len(choices) == len(set(choices)) > 20
    for choice in choices:
        widths = choice.widths
        assert widths.devices == 4
        assert choice.num_microbatches * choice.microbatch_size * widths.data == 16
        assert choice.num_chunks == 1 or choice.num_microbatches % widths.pipeline == 0
    experts = search(decoder=load_decoder("mixtral-8x7b", SMALL), fixed={"tensor": 1, "pipeline": 1})
    assert {x.widths.expert for x in experts.choices()} == {1, 2, 4}


def test_no_plan_is_faster_than_its_bound_and_none_than_the_best() -> None:
    made = search(fixed={"microbatch_size": 2})
    best = made.run()
    planned = [(made.bound_s(x), made.planned(x)) for x in made.choices()]
    steps = [plan.prediction.step_s for _, plan in planned if plan is not None]
    assert all(plan is None or bound <= plan.prediction.step_s * (1 + 1e-9) for bound, plan in planned)
    assert best.found[0].step_s == pytest.approx(min(steps))
    assert best.gap == pytest.approx(0, abs=0.05)


def test_a_memory_that_nothing_fits_names_a_machine_that_may() -> None:
    tight = replace(load_hardware("rtx4090"), memory_bytes=4_000_000_000)
    with pytest.raises(NoPlanError, match=r"fits on no split of 4 devices .* try some \d+ devices"):
        search(hardware=tight, decoder=load_decoder("llama3-8b")).run()
    with pytest.raises(UsageError, match="no widths divide 3 devices, 8 heads and a batch of 7 samples"):
        search(num_devices=3, batch_size=7, fixed={"microbatch_size": 4}).run()
    with pytest.raises(UsageError, match="need a multiple of 2 devices, not 3; try 4 devices"):
        search(num_devices=3, fixed={"tensor": 2}).run()


def test_names_and_dials() -> None:
    told = list[str]()
    dials: dict[str, Any] = dict.fromkeys(
        ("tensor", "context", "expert", "data", "num_devices", "num_chunks", "microbatch_size", "recompute")
    )
    common = {"receiver": "megatron", "hardware": "h100", "settings": ["num_hidden_layers=8"], "on_start": told.append}
    found = layout_of("meta-llama/Llama-3.1-8B", **common, **{**dials, "num_devices": 2, "tensor": 2})
    assert (found.found[0].choice.widths.devices, found.num_choices) == (4, 1)
    assert told == ["meta-llama/Llama-3.1-8B: 2.80 billion parameters"]
    with pytest.raises(UsageError, match="give --gpus N to have all widths chosen"):
        layout_of("llama3-8b", **common, **dials)


def test_layout_on_a_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small = [x for key, value in SMALL.items() for x in ("--set", f"{key}={value}")]
    arguments = ["--gpus", "4", "--gbs", "16", "--mbs", "2", "--tp", "2", "--hardware", "l40s", *small]
    assert gplan_exits("layout", "llama-3-8b", *arguments) == 0
    captured = capsys.readouterr()
    assert "--tensor-model-parallel-size 2" in captured.out and "--sequence-parallel" in captured.out
    assert "predicted: a step of" in captured.err and "the best of" in captured.err
    assert gplan_exits("layout", "llama3-8b", "--gpus", "4", "--network", "400Gb/s") == 2
    assert "write the bandwidth in bytes" in capsys.readouterr().err


def test_multi_token_prediction_does_not_tie_the_head() -> None:
    dials: dict[str, Any] = dict.fromkeys(
        ("tensor", "context", "expert", "data", "num_devices", "num_chunks", "microbatch_size", "recompute")
    )
    common: dict[str, Any] = {**dials, "num_devices": 2, "receiver": "megatron", "hardware": "h200"}
    settings = ["num_hidden_layers=16", "num_nextn_predict_layers=1", "hidden_size=1024", "intermediate_size=4096"]
    for tied, flag in ((False, True), (True, False)):
        found = layout_of(
            "llama3-8b", **common, settings=[*settings, f"tie_word_embeddings={str(tied).lower()}"]
        ).found[0]
        text = export(found.exported, to="megatron", profile=found.profile).text
        assert ("--untie-embeddings-and-output-weights" in text) is flag
        assert "--mtp-num-layers 1" in text


def test_the_older_name_of_torchtitans_head_is_read() -> None:
    profile = search(fixed={}).profile_of(Widths(), 1)
    layers = [f"layers.{i}" for i in range(6)]
    text = str([["tok_embeddings", *layers[:4]], [*layers[4:], "norm", "output"]])
    assert read_layout(text, profile, receiver="torchtitan").cuts == (5,)
