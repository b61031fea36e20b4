"""A profile as text: whole numbers in any width, alike layers folded, long models in a page."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gplan.core import Layer, Profile, SharedWeight, Timing, WholeModel, Work
from gplan.reporting.text.fitted_table import MOST_LINES
from gplan.reporting.text.profile import profile_view
from tests.made import make_profile
from tests.reporting.text.printed import printed


def blocks(count: int, *, measured: int | None = None) -> Profile:
    """An embedding, blocks that take some 2 ms, of which the first `measured` and the last were measured,
    and a head."""
    forward_s = [0.0001, *(0.002 + 1e-9 * i for i in range(count)), 0.005]
    made = make_profile(forward_s, weight_bytes=2048, stash_bytes=4096, output_bytes=512)
    names = ["embedding", *(f"blocks.{i}" for i in range(count)), "head"]
    layers = [replace(x, name=name) for x, name in zip(made.layers, names, strict=True)]
    for i in range(count if measured is None else measured + 1, count):
        layers[i] = replace(layers[i], same_as=2, costs=layers[2].costs)
    return replace(made, layers=tuple(layers))


def with_costs(profile: Profile, **changes: object) -> Profile:
    def changed(layer: Layer) -> Layer:
        return replace(layer, costs=tuple(replace(x, **changes) for x in layer.costs))  # type: ignore[arg-type]

    return replace(profile, layers=tuple(map(changed, profile.layers)))


def first_cells(lines: list[str]) -> list[str]:
    """What the rows of the (only) table begin with, from below its header to the first sentence."""
    start = next(i for i, line in enumerate(lines) if line.startswith("layer ")) + 1
    end = next(
        i
        for i, line in enumerate(lines)
        if line.startswith(("left out", "±: ", "rate: ", "share: ")) or "more rows" in line
    )
    return [line.split("  ")[0] for line in lines[start:end]]


def profile_with_long_names() -> Profile:
    made = make_profile([0.0012, 0.0034], weight_bytes=5000, stash_bytes=7000, output_bytes=900)
    layers = tuple(replace(x, name=f"encoder.layers.{i}.attention.output.dense") for i, x in enumerate(made.layers))
    seconds = Timing.exactly
    whole = WholeModel(microbatch_size=1, forward=seconds(0.0046), backward=seconds(0.0))
    return replace(made, layers=layers, loss=made.layers[0].costs, whole_model=(whole,))


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_numbers_keep_their_units_and_rows_their_names(width: int) -> None:
    lines = printed(profile_view(profile_with_long_names()), width=width)
    rows = [line for line in lines if line.startswith(("encoder", "(loss)"))]
    assert len(rows) == 3
    assert all("1.20 ms" in line or "3.40 ms" in line for line in rows)
    assert all("4.88 KiB" in line or "0 B" in line for line in rows)
    assert all(len(line) <= width for line in lines)
    assert not any("1.20 …" in line or "m…" in line for line in lines)


def test_in_the_models_order_only_layers_that_were_not_measured_are_folded() -> None:
    lines = printed(profile_view(blocks(96, measured=3)), width=160)
    assert first_cells(lines) == [
        "embedding", "blocks.0", "blocks.1", "blocks.2", "blocks.3 … blocks.94, 92 layers like blocks.1", "blocks.95",
        "head",
    ]  # fmt: skip


def test_in_the_models_order_layers_that_follow_each_other_with_the_same_figures_are_one_row() -> None:
    lines = printed(profile_view(make_profile([0.001, 0.002, 0.002, 0.002, 0.001])))
    assert first_cells(lines) == ["a", "b … d, 3 layers alike", "e"]


def test_two_kinds_of_layers_that_alternate_are_a_row_each_where_they_were_not_measured() -> None:
    made = make_profile([0.001, 0.002] * 4)
    layers = (*made.layers[:2], *(replace(x, same_as=i % 2) for i, x in enumerate(made.layers[2:])))
    lines = printed(profile_view(replace(made, layers=layers)))
    assert first_cells(lines) == ["a", "b", "c … g, 3 layers like a", "d … h, 3 layers like b"]


def test_by_cost_a_layer_and_all_that_are_like_it_are_one_row_with_their_share_together() -> None:
    lines = printed(profile_view(blocks(96, measured=3), sort="cost"))
    assert first_cells(lines) == ["blocks.1 and 92 like it", "head", "blocks.95", "blocks.2", "blocks.0", "embedding"]
    share = 93 * 0.002 / (0.0001 + 96 * 0.002 + 0.005)
    assert f" {100 * share:.1f} %" in next(line for line in lines if line.startswith("blocks.1 and"))


def test_unfolded_every_layer_has_a_row_of_its_own_and_a_copy_says_so() -> None:
    cells = first_cells(printed(profile_view(blocks(96, measured=3), sort="cost", is_folded=False)))
    assert len(cells) == 98
    assert {"blocks.2", "blocks.3, like blocks.1", "blocks.94, like blocks.1"} <= set(cells)


@pytest.mark.parametrize(("sort", "last"), [("order", "head"), ("cost", "…")])
def test_a_model_of_1663_measured_blocks_prints_in_a_page(sort: str, last: str) -> None:
    lines = printed(profile_view(blocks(1663), sort=sort))  # type: ignore[arg-type]
    cells = first_cells(lines)
    assert len(cells) == MOST_LINES
    assert cells[-1] == last
    assert cells.count("…") == 1
    assert "1606 more rows: gplan show --all" in lines


def test_by_memory_the_layer_that_holds_most_comes_first_and_its_bytes_are_kept_in_a_narrow_terminal() -> None:
    profile = make_profile([3.0, 1.0, 2.0], weight_bytes=[4, 400, 40], stash_bytes=[8, 8, 8000])
    lines = printed(profile_view(profile, sort="memory"), width=60)
    assert first_cells(lines) == ["c", "b", "a"]
    assert all(title in lines[1] for title in ("weights", "stash", "share"))


def test_contention_rates_and_halves_have_columns_only_where_there_are_figures() -> None:
    plain = make_profile([0.001, 0.001], output_bytes=4)
    assert not {"slowdown", "rate", "intensity", "gradient"} & set(header(plain)) - {"gradient"}
    work = (Work(kind="matmul", num_operations=1, num_flops=6_000_000, num_bytes=100_000),)
    full = with_costs(
        replace(plain, num_neighbours=1), slow_down=1.25, forward_work=work, weight_gradient=Timing.exactly(0.0007)
    )
    assert {"slowdown", "rate", "intensity"} <= set(header(full))
    text = "\n".join(printed(profile_view(full), width=200))
    assert "weight gradient" in text and "first backward" not in text
    for cell in ("× 1.25", "2.00 GFLOP/s", "60.0 FLOP/B", "700 µs"):
        assert cell in text


def test_what_waits_between_the_halves_has_a_column_only_where_something_does() -> None:
    plain = make_profile([0.001, 0.001])
    assert "pending" not in header(plain) and "pending" in header(with_costs(plain, pending_bytes=4))


def test_a_spread_is_shown_only_where_something_was_sampled() -> None:
    profile = make_profile([0.001, 0.001])
    sampled = Timing(median_s=0.001, low_s=0.0009, high_s=0.0011, num_samples=5)
    assert "±" not in header(with_costs(profile, forward=Timing.exactly(0.001), backward=Timing.exactly(0.002)))
    assert header(with_costs(profile, forward=sampled, backward=sampled)).count("±") == 2


def header(profile: Profile) -> list[str]:
    return printed(profile_view(profile), width=200)[1].split()


def test_a_time_of_another_origin_is_marked_and_the_mark_is_explained() -> None:
    profile = replace(make_profile([0.001, 0.002]), origin="measured")
    first = Timing(median_s=0.001, low_s=0.001, high_s=0.001, num_samples=3)
    cost = replace(profile.layers[0].costs[0], forward=first, backward=Timing.exactly(0.004, origin="computed"))
    text = "\n".join(printed(profile_view(replace(profile, layers=(replace(profile.layers[0], costs=(cost,)),)))))
    assert "c 4.00 ms" in text
    assert "  1.00 ms" in text
    assert "times and bytes measured; c: computed" in text


def test_a_size_that_is_not_shown_is_told_with_what_it_costs_and_how_to_see_it() -> None:
    profile = make_profile([0.001, 0.002], overhead_s=0.0005, microbatch_sizes=(1, 4))
    one = printed(profile_view(profile, microbatch_sizes=(4,)))
    assert [line for line in one if line.startswith("made, micro-batch")] == [
        "made, micro-batch size 4: times and bytes per micro-batch"
    ]
    assert (
        "micro-batch size 1: forward 3.50 ms, backward 6.50 ms, 10.0 ms per sample; --microbatch-size 1 shows its layers"
        in one
    )
    both = [line for line in printed(profile_view(profile)) if line.startswith("made, micro-batch")]
    assert both == [f"made, micro-batch size {size}: times and bytes per micro-batch" for size in (1, 4)]


def test_a_layer_with_shared_weights_only_says_so() -> None:
    shared = SharedWeight(name="embedding.weight", layers=(0, 2), num_parameters=9, weight_bytes=36, gradient_bytes=36)
    profile = make_profile([1.0, 2.0, 3.0], weight_bytes=[0, 0, 8], shared_weights=(shared,))
    rows = {line.split()[0]: line.split() for line in printed(profile_view(profile)) if line.split()}
    assert "shared" in rows["a"]
    assert "shared" not in rows["b"] and "shared" not in rows["c"]


def test_below_stand_notes_shared_weights_the_machine_and_the_date() -> None:
    shared = SharedWeight(name="embedding.weight", layers=(0, 1), num_parameters=9, weight_bytes=36, gradient_bytes=36)
    profile = replace(make_profile([1.0, 2.0], shared_weights=(shared,)), notes=("layers 3 to 94 not measured",))
    text = "\n".join(printed(profile_view(replace(profile, versions=(("torch", "2.13.0"),)))))
    for told in (
        "note: layers 3 to 94 not measured", "shared by a, b: embedding.weight, 36 B", "made, threads: 1",
        "made 2000-01-01T00:00:00+00:00 with torch 2.13.0", "the model was not measured in one piece",
    ):  # fmt: skip
        assert told in text


def test_a_model_whose_layers_cost_nothing_still_prints() -> None:
    lines = printed(profile_view(make_profile([0.0, 0.0], weight_bytes=[1, 2]), sort="cost"))
    assert first_cells(lines) == ["a", "b"]
    assert "–" in lines[2]
