"""nanotron's sections, and the cut that it makes itself."""

from __future__ import annotations

import pytest
import yaml

from gplan.core.errors import UsageError
from gplan.interop.export.exporters import export
from gplan.interop.layouts import read_layout
from gplan.interop.machine_layout import layout_of
from gplan_profiler.analytic.decoder_config import load_decoder
from gplan_profiler.analytic.trainers import layers_by_cost


def test_sections_have_the_values_of_the_plan() -> None:
    made = layout_of(
        "llama3-8b", receiver="nanotron", hardware="h100", num_devices=4, tensor=2, data=2, microbatches=16, microbatch_size=2
    )  # fmt: skip
    written = export(made.plan, to="nanotron", profile=made.profile)
    assert not any("gplan layout --to nanotron" in x for x in written.notes)  # that is how it was made
    sections = yaml.safe_load(written.text)
    parallel, tokens = sections["parallelism"], sections["tokens"]
    assert (parallel["dp"], parallel["pp"], parallel["tp"], parallel["pp_engine"]) == (2, 4, 2, "1f1b")
    assert tokens == {"sequence_length": 4096, "micro_batch_size": 2, "batch_accumulation_per_replica": 16}
    assert sections["optimizer"]["zero_stage"] == 1
    assert made.profile.versions[0][0] == "nanotron"


def test_plans_have_the_cut_that_nanotron_makes() -> None:
    """Of 36 = 32 + 4.04 blocks' worth of products, a stage ends with the first block above its share."""
    decoder = load_decoder("llama3-8b", {})
    block = 4 * 4096**2 + 3 * 4096 * 14336
    assert 128256 * 4096 / block == pytest.approx(2.16, abs=0.01)
    assert layers_by_cost(decoder, 4) == (9, 9, 8, 8)  # 8.54, 17.08 and 25.62 blocks; norm and head on the last
    made = layout_of("llama3-8b", receiver="nanotron", hardware="h100", num_devices=4)
    assert [x.end_layer for x in made.plan.stages] == [10, 19, 27, 35]
    with pytest.raises(UsageError, match="cuts the blocks itself"):
        read_layout("pp: 4", made.profile, receiver="nanotron")


def test_a_stage_without_layers_is_refused() -> None:
    with pytest.raises(UsageError, match="without layers"):
        layout_of("llama3-8b", receiver="nanotron", hardware="h100", num_devices=16, settings=["num_hidden_layers=14"])
