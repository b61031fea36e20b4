"""GPipe's published tables, recomputed: benchmarks/gpipe_paper.py at sizes that take seconds."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import gpipe_paper
import pandas as pd
import pytest
from paper import charts, counts, early, largest, parts, profiles, published, text, throughput

import gplan
from gplan.core import Profile, StageCost
from gplan.core.errors import NoPlanError
from gplan.schedules.registry import make_schedule
from gplan.simulation.simulator import simulate_schedule

REPORT = Path(__file__).parents[2] / "reports" / "gpipe-paper"
SMALL = {"width": 32, "feed_forward": 64, "num_heads": 2, "vocabulary": 256, "sequence_length": 16}
TARGET = profiles.Target(hardware="tpu-v3", microbatch_sizes=(1, 4))


@pytest.fixture(scope="module")
def shallow() -> Profile:
    return profiles.transformer_profile(8, TARGET, **SMALL)


# Counts


@pytest.mark.parametrize(
    ("num_layers", "feed_forward", "num_heads"), [(6, 8192, 16), (24, 8192, 16), (12, 16384, 32), (64, 16384, 32)]
)
def test_nmt_transformer_has_the_parameters_of_the_closed_form(
    num_layers: int, feed_forward: int, num_heads: int
) -> None:
    d, f, a, v = 1024, feed_forward, 64 * num_heads, 64_000
    attention = 4 * d * a + 3 * a + d
    perceptron = 2 * d * f + f + d
    encoder, decoder = attention + perceptron + 2 * 2 * d, 2 * attention + perceptron + 3 * 2 * d
    found = counts.num_parameters(
        "nmt_transformer", paper=True, num_layers=num_layers, feed_forward=feed_forward, num_heads=num_heads
    )
    assert found == num_layers * (encoder + decoder) + 2 * 2 * d + 2 * v * d + v


def test_nmt_transformer_of_64_layers_each_has_six_billion_parameters() -> None:
    assert counts.num_parameters("nmt_transformer", paper=True, num_layers=64) == 6_040_979_968


def test_deep_and_wide_nmt_transformers_are_as_large_as_each_other_as_the_paper_says() -> None:
    deep, wide = (
        counts.num_parameters("nmt_transformer", paper=True, num_layers=x, feed_forward=f, num_heads=a)
        for x, f, a in ((24, 8192, 16), (12, 16384, 32))
    )
    assert deep == pytest.approx(wide, rel=1e-3)


def test_amoebanet_b_cannot_have_the_cells_of_d() -> None:
    exact = counts.num_parameters("amoebanet_d", num_layers=18, num_filters=512, num_classes=1000)
    assert exact == 481_268_200  # the paper's AmoebaNet-B(18, 512) has 557 million


@pytest.mark.parametrize("column", (*published.AMOEBANET_LARGEST[1:4], *published.TRANSFORMER_LARGEST))
def test_parameter_memory_of_table_1_is_12_bytes_each_in_the_unit_of_its_half(column: published.Largest) -> None:
    unit = published.GB if column.num_filters else published.GIB
    assert 12 * column.exact_parameters / unit == pytest.approx(column.parameter_memory, rel=0.02)


def test_naive_column_of_the_transformer_has_its_memory_rows_swapped_in_print() -> None:
    naive = published.TRANSFORMER_LARGEST[0]
    assert 12 * naive.exact_parameters / published.GIB == pytest.approx(3.15, abs=0.01)
    assert (naive.parameter_memory, naive.activation_memory) == (3.15, 11.7)  # printed as 11.7 and 3.15


# Profiles


def test_a_grown_transformer_costs_what_a_profiled_one_costs(shallow: Profile) -> None:
    deep = profiles._profile("transformer_l", TARGET, num_layers=8, **SMALL)
    assert [x.costs for x in shallow.layers] == [x.costs for x in deep.layers]
    assert shallow.num_parameters == deep.num_parameters
    assert shallow.step.state_bytes == pytest.approx(deep.step.state_bytes, rel=1e-3)
    assert shallow.step.optimizer.median_s == pytest.approx(deep.step.optimizer.median_s, rel=1e-3)


def test_a_profile_does_not_grow_backwards(shallow: Profile) -> None:
    with pytest.raises(ValueError, match=r"copies of layers; expected 0 or more"):
        profiles.grown(shallow, {"head": -1})


def test_parameters_counted_as_in_the_paper_take_12_bytes_with_their_gradient(shallow: Profile) -> None:
    counted = profiles.counted_as_in_the_paper(shallow, 12)
    assert 2 * counted.trained_bytes + counted.step.state_bytes == 12 * shallow.num_parameters
    with pytest.raises(ValueError, match="weight and gradient alone take 8"):
        profiles.counted_as_in_the_paper(shallow, 4)


def test_attention_keeps_its_scores_unless_it_is_fused(shallow: Profile) -> None:
    fused_target = profiles.Target(hardware="tpu-v3", microbatch_sizes=(1,), has_fused_attention=True)
    fused = profiles.transformer_profile(3, fused_target, **SMALL)
    kept, fused_kept = (x.layers[1].costs[0].stash_bytes for x in (shallow, fused))
    scores = SMALL["num_heads"] * SMALL["sequence_length"] ** 2 * 4
    assert kept - fused_kept >= scores


# The largest model


def setting(num_devices: int, *, bytes_per_parameter: int = 16) -> largest.Setting:
    return largest.Setting(
        num_devices=num_devices, batch_size=4, num_microbatches=4, bytes_per_parameter=bytes_per_parameter
    )


def limited(profile: Profile, memory_bytes: int) -> Profile:
    return replace(profile, device=replace(profile.device, memory_bytes=memory_bytes))


@pytest.mark.parametrize(("num_devices", "bytes_per_parameter"), list(itertools.product((1, 2, 3), (12, 16))))
def test_a_model_fits_exactly_where_balance_has_a_plan(
    shallow: Profile, num_devices: int, bytes_per_parameter: int
) -> None:
    asked = setting(num_devices, bytes_per_parameter=bytes_per_parameter)
    answers = []
    for memory_bytes in range(200_000, 3_200_000, 300_000):
        profile = limited(shallow, memory_bytes)
        counted = profile if bytes_per_parameter == 16 else profiles.counted_as_in_the_paper(profile, 12)
        try:
            gplan.balance(counted, num_devices=num_devices, num_microbatches=4, microbatch_size=1, recompute="always")
            has_plan = True
        except NoPlanError:
            has_plan = False
        assert largest.fits(profile, asked) == has_plan
        answers.append(has_plan)
    assert True in answers and False in answers


def test_deepest_model_fits_and_one_layer_more_does_not() -> None:
    def profile_of(num_layers: int) -> Profile:
        return limited(profiles.transformer_profile(num_layers, TARGET, **SMALL), 1_200_000)

    found = largest.deepest(profile_of, setting(4), at_most=500)
    assert 4 < found < 500
    assert largest.fits(profile_of(found), setting(4)) and not largest.fits(profile_of(found + 1), setting(4))


def test_nothing_is_deepest_where_not_even_a_layer_each_fits() -> None:
    def profile_of(num_layers: int) -> Profile:
        return limited(profiles.transformer_profile(num_layers, TARGET, **SMALL), 1000)

    assert largest.deepest(profile_of, setting(4), at_most=500) == 0


def test_a_model_without_pipeline_runs_on_one_device_only() -> None:
    with pytest.raises(ValueError, match="expected one device and one micro-batch"):
        largest.Setting(num_devices=2, batch_size=4, num_microbatches=1, bytes_per_parameter=12, is_pipelined=False)


def test_memory_taken_is_that_of_all_devices(shallow: Profile) -> None:
    taken = largest.memory_taken(shallow, setting(2))
    assert taken.does_fit
    assert taken.parameter_bytes == 16 * shallow.num_parameters
    assert taken.largest_bytes <= taken.parameter_bytes + taken.activation_bytes <= 2 * taken.largest_bytes + 1000


# Throughput


def stage(forward_s: float, *, recompute_s: float, transfer_s: float = 0.0) -> StageCost:
    return StageCost(
        forward_s=forward_s,
        backward_s=2 * forward_s,
        recompute_s=recompute_s,
        optimizer_s=0.5,
        activation_bytes=1,
        gradient_bytes=1,
        activation_s=transfer_s,
        gradient_s=transfer_s,
    )


@pytest.mark.parametrize("num_microbatches", (1, 2, 5))
def test_recomputing_ahead_without_recompute_is_gpipe(num_microbatches: int) -> None:
    costs = [
        stage(1.0, recompute_s=0.0, transfer_s=0.3),
        stage(2.0, recompute_s=0.0, transfer_s=0.1),
        stage(1.5, recompute_s=0.0),
    ]
    schedule = make_schedule("gpipe", num_devices=3, num_microbatches=num_microbatches)
    expected = simulate_schedule(schedule, costs, recompute="never").step_s
    assert early.recomputing_ahead_s(costs, num_microbatches=num_microbatches) == pytest.approx(expected)


def test_recomputing_ahead_hides_all_recomputes_but_the_last_stage_s_in_a_single_microbatch() -> None:
    costs = [stage(1.0, recompute_s=1.0)] * 4
    assert early.recomputing_ahead_s(costs, num_microbatches=1) == 4 * 3.0 + 1.0 + 0.5


def test_gplan_s_step_is_never_longer_than_that_of_gpipe_s_rule(shallow: Profile) -> None:
    found = throughput.cells(shallow, batch_size=4, device_counts=(2, 3), microbatch_counts=(1, 4))
    assert [(x.num_devices, x.num_microbatches) for x in found] == [(2, 1), (3, 1), (2, 4), (3, 4)]
    for cell in found:
        assert cell.rule_s is not None and cell.best_s <= cell.rule_s * (1 + 1e-9)
        assert cell.ahead_s is not None and cell.ahead_s <= cell.rule_s * (1 + 1e-9)


def test_a_rule_that_leaves_a_stage_empty_has_no_throughput(shallow: Profile) -> None:
    found = throughput.cells(shallow, batch_size=4, device_counts=(2, 10), microbatch_counts=(4,))
    relative = throughput.normalised_seconds(found, "rule_s")
    assert relative[2, 4] == 1.0 and (relative[10, 4] is None) == (found[1].rule_s is None)


@pytest.mark.parametrize(
    "table", [published.TPU_AMOEBANET, published.TPU_TRANSFORMER, published.GPU_AMOEBANET, published.GPU_TRANSFORMER]
)
def test_published_throughputs_are_normalised_by_their_first_cell(table: published.Throughputs) -> None:
    assert published.normalised(table) == table


# The report


@pytest.fixture(scope="module")
def tables() -> dict[str, pd.DataFrame]:
    return {part: pd.read_csv(REPORT / f"{part}.csv") for part in parts.PARTS}


def test_the_report_says_what_its_tables_say(tables: dict[str, pd.DataFrame]) -> None:
    further = [(REPORT / name).read_text() for name in gpipe_paper.FURTHER if (REPORT / name).exists()]
    assert text.report(tables, further=further) == (REPORT / "README.md").read_text()


def test_charts_are_drawn_from_the_tables(tables: dict[str, pd.DataFrame], tmp_path: Path) -> None:
    charts.draw(tables, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"largest.png", "throughput.png"}


def test_transformer_rows_with_32_microbatches_are_within_a_tenth_of_the_paper(tables: dict[str, pd.DataFrame]) -> None:
    table = tables["throughput"]
    rows = table[table.model.str.startswith("Transformer") & (table.cut == "operations") & (table.m == 32)]
    assert len(rows) == 6
    assert ((rows.best / rows.paper - 1).abs() < 0.1).all() and ((rows.rule / rows.paper - 1).abs() < 0.1).all()


def test_counts_in_the_report_are_those_of_the_examples(tables: dict[str, pd.DataFrame]) -> None:
    exact = dict(zip(tables["counts"].model, tables["counts"].exact, strict=True))
    found = {x.model: x.exact for x in itertools.islice(counts.counts(), 1)}
    assert found.items() <= exact.items()
    for row in (*published.AMOEBANET_LARGEST, *published.TRANSFORMER_LARGEST):
        assert row.exact_parameters in exact.values()
