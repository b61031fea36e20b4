"""The report's section on what was measured here: tables with the paper's figures beside ours, and why they differ."""

from __future__ import annotations

import pandas as pd

from gplan.core.units import percent_text, seconds_text
from paper.measured import BATCH_SIZE, MICROBATCH_COUNTS, SUBJECTS, Subject
from paper.measured_figures import BREAKDOWN, breakdowns, recompute_of_backward, throughputs
from paper.text import markdown

_HEADS = {"passing": "transfers, engine", "setup": "set-up"}
_WAYS = (
    ("gplan's best", "best", "virtual"),
    ("GPipe's rule", "rule", "virtual"),
    ("gplan's best, two processes", "best", "torch"),
)


def section(table: pd.DataFrame) -> str:
    """The whole section as Markdown; `table` has a row for each model, case and round."""
    figures, parts = throughputs(table), breakdowns(table)
    subjects = [subject for subject in SUBJECTS if subject.title in set(table.model)]
    lines = ["## Measured here, scaled down\n", _head(table, figures), _reading()]
    for subject in subjects:
        lines += _throughput_table(subject, figures[figures.model == subject.title])
    lines += _linked_table(subjects, figures)
    lines += _throughput_reasons(subjects, figures)
    lines += ["### Where a step goes\n", _breakdown_head(int(figures.m.max())), *_breakdown_table(parts)]
    lines += _breakdown_reasons(table, parts)
    return "\n".join([*lines, "![measured](measured.png)\n"])


def _head(table: pd.DataFrame, figures: pd.DataFrame) -> str:
    first = table.iloc[0]
    *larger, smallest = (BATCH_SIZE // m for m in MICROBATCH_COUNTS)
    refused = percent_text(table.num_disturbed.sum() / table.num_timed.sum())
    return (
        f"`python benchmarks/gpipe_measured.py --steps {first.num_steps} --rounds {first.num_rounds}`: {first.device}, one "
        f"core for each process, torch {first.torch}, {table.created.min()}; nothing here was calibrated. The paper's models "
        f"are scaled down until a step takes {seconds_text(figures.measured_step_s.min())} to "
        f"{seconds_text(figures.measured_step_s.max())}, the batch is {BATCH_SIZE} throughout, so a micro-batch is "
        f"{', '.join(map(str, larger))} or {smallest}. All plans of a model are run in turns, round after round, and compared within a round, by the "
        f"medians of {first.num_timed} timed steps a run; other work disturbed {refused} of the timed steps. The prediction comes from a profile of the layers taken before.\n"
    )


def _reading() -> str:
    return (
        "There are not 8 devices here. The *virtual engine* computes every action of the schedule in one process on one "
        "core and times it; those durations are then laid out on K devices by the simulator's rules, with the link as it was "
        "measured between two processes. So its step time shows what stages take, how even they are and how the schedule "
        "fills with them; it cannot show that real links queue, or that devices disturb each other. *Two processes* are the "
        "torch engine, K = 2: there step, transfers and waiting are all real, by way of the host's memory. Throughput is that "
        "of the engine's own first cell, gplan's best at K = 2, M = 1; in parentheses measured over paper, and predicted over "
        "measured. *At even cost* is what was measured, had a sample cost the same in micro-batches of any size.\n"
    )


def _throughput_table(subject: Subject, figures: pd.DataFrame) -> list[str]:
    device_counts = sorted(set(figures.k))
    rows = []
    for m in sorted(set(figures.m)):
        rows.append([f"{m}", "paper", *(f"{x:g}" for x in subject.published[m])])
        for title, way, engine in _WAYS:
            part = figures[(figures.m == m) & (figures.way == way) & (figures.engine == engine)].set_index("k")
            if len(part):
                rows += _rows_of_way(title, part, dict(zip(device_counts, subject.published[m], strict=True)))
    title = f"Table 2, {subject.title} where the paper has {subject.stands_for}:\n"
    return [title, *markdown(["M", "", *(f"K = {k}" for k in device_counts)], rows)]


def _rows_of_way(title: str, part: pd.DataFrame, published: dict[int, float]) -> list[list[str]]:
    """Measured, predicted and, of gplan's best on the virtual engine, at even cost; empty where there is no plan."""
    measured, predicted, even = ["", f"{title}, measured"], ["", f"{title}, predicted"], ["", f"{title}, at even cost"]
    for k, paper in published.items():
        if k not in part.index:
            absent = "" if title.endswith("processes") else "no plan"
            measured, predicted, even = [*measured, absent], [*predicted, absent], [*even, absent]
            continue
        x = part.loc[k]
        measured.append(f"{x.measured:.2f} ({x.measured / paper:.2f})")
        predicted.append(f"{x.predicted:.2f} ({x.predicted / x.measured:.2f})")
        even.append(f"{x.even:.2f} ({x.even / paper:.2f})")
    return [measured, predicted, even] if title == "gplan's best" else [measured, predicted]


def _linked_table(subjects: list[Subject], figures: pd.DataFrame) -> list[str]:
    """Table 3: the row with the most micro-batches over its own first cell."""
    m = int(figures.m.max())
    full = figures[(figures.m == m) & (figures.engine == "virtual")]
    device_counts, rows = sorted(set(full.k)), []
    for subject in subjects:
        paper = subject.published_linked[m]
        rows.append([subject.stands_for_linked, "paper", *(f"{x:g}" for x in paper)])
        for title, way, _ in _WAYS[:2]:
            part = full[(full.model == subject.title) & (full.way == way)].set_index("k").reindex(device_counts)
            for name in ("measured", "predicted"):
                values = [x / part[name].iloc[0] for x in part[name]]
                shown = ["no plan" if x != x else f"{x:.2f} ({x / y:.2f})" for x, y in zip(values, paper, strict=True)]
                rows.append(["", f"{title}, {name}", *shown])
    title = f"Table 3, M = {m}, each over its own K = 2, in parentheses over the paper's; the runs are those of the tables above:\n"
    return [title, *markdown(["model", "", *(f"K = {k}" for k in device_counts)], rows)]


def _throughput_reasons(subjects: list[Subject], figures: pd.DataFrame) -> list[str]:
    best = figures[(figures.way == "best") & (figures.engine == "virtual")]
    lines = [_on_prediction(figures)]
    for subject in subjects:
        lines.append(_on_microbatches(subject, best[best.model == subject.title]))
    lines += [
        _on_single(subjects, best),
        "- **The paper's M = 4 rows** had another batch in some cells (see above), so their ratios say little; here the batch "
        "never changes.",
        *_on_rule(subjects, figures),
        _on_processes(figures),
        "- **Table 3** asks what slow links cost. A virtual link costs only what one message takes; contention for a bus, which "
        "the paper's PCIe had, is not in it, so these rows are about stages, not about links.\n",
    ]
    return lines


def _on_prediction(figures: pd.DataFrame) -> str:
    errors = figures.predicted / figures.measured - 1
    steps = figures.predicted_step_s / figures.measured_step_s - 1
    spread = (
        f"the rounds of one case differ by {percent_text(figures.spread.median())} in the median and "
        f"{percent_text(figures.spread.max())} at most, and a difference smaller than that between two figures says nothing."
        if figures.spread.max()
        else "there was one round, so what of that is the host's own drift cannot be said."
    )
    return (
        f"- **Predicted against measured**: the normalised throughputs are wrong by {percent_text(errors.abs().median())} in "
        f"the median and {percent_text(errors.iloc[errors.abs().argmax()], signed=True)} at worst, the steps in seconds by "
        f"{percent_text(steps.abs().median())} and {percent_text(steps.iloc[steps.abs().argmax()], signed=True)}; {spread}"
    )


def _on_microbatches(subject: Subject, best: pd.DataFrame) -> str:
    few, most = best.k.min(), best.m.max()
    cell, wide = (best[(best.m == most) & (best.k == k)].iloc[0] for k in (few, best.k.max()))
    return (
        f"- **{subject.stands_for}, M = {most}**: a sample alone in its micro-batch costs {cell.cost:.1f} times what it costs "
        f"in one of {BATCH_SIZE}, as what an operation costs whatever its size then weighs more. So K = {few} comes to "
        f"{cell.measured:.2f} where the paper has {subject.published[int(most)][0]:g}; at even cost it would be {cell.even:.2f}, and "
        f"K = {wide.k} {wide.even:.2f} where the paper has {subject.published[int(most)][-1]:g} and equal stages without a bubble "
        f"would give {wide.k:g}. An accelerator loses by small micro-batches too, how much the paper does not say."
    )


def _on_single(subjects: list[Subject], best: pd.DataFrame) -> str:
    single = best[best.m == best.m.min()]
    published = " and ".join(f"{subject.published[int(best.m.min())][-1]:g}" for subject in subjects)
    return (
        f"- **The M = 1 row** is {single.measured.min():.2f} to {single.measured.max():.2f} here, {single.predicted.min():.2f} to "
        f"{single.predicted.max():.2f} predicted: one micro-batch leaves nothing to overlap, whatever K. The paper's rises to "
        f"{published}; it recomputes before the gradient has come (see above), which this engine does not."
    )


def _on_rule(subjects: list[Subject], figures: pd.DataFrame) -> list[str]:
    """Where the rule has a plan, by how much gplan's best is faster with the most micro-batches."""
    full = figures[(figures.m == figures.m.max()) & (figures.engine == "virtual")]
    pairs = full[full.way == "best"].merge(full[full.way == "rule"], on=["model", "k"], suffixes=("_best", "_rule"))
    if pairs.empty:
        return []
    stands_for = {subject.title: subject.stands_for for subject in subjects}
    found = [
        f"{stands_for[x['model']]} at K = {x['k']} {percent_text(x['measured_best'] / x['measured_rule'] - 1, signed=True)} "
        f"({percent_text(x['predicted_best'] / x['predicted_rule'] - 1, signed=True)})"
        for x in pairs.to_dict("records")
    ]
    return [
        f"- **GPipe's rule** balances FLOPs, not seconds. gplan's best has this much more throughput at M = {figures.m.max()}, "
        f"measured (and predicted): {'; '.join(found)}. Where both have the same cuts they share one run."
    ]


def _on_processes(figures: pd.DataFrame) -> str:
    few = figures[(figures.way == "best") & (figures.k == figures.k.min())]
    pairs = few[few.engine == "torch"].merge(
        few[few.engine == "virtual"], on=["model", "m"], suffixes=("_real", "_laid")
    )
    ratios = pairs.measured_step_s_real / pairs.measured_step_s_laid
    return (
        f"- **Two real processes** take {ratios.min():.2f} to {ratios.max():.2f} times as long for a step as the virtual engine's "
        "layout of K = 2: what they share (memory, caches, the clock of the host's cores) and what passing messages "
        "takes of a core is in the one and not in the other. The predictions for two processes count both in."
    )


def _breakdown_head(num_microbatches: int) -> str:
    return (
        f"M = {num_microbatches}, every micro-batch recomputed, shares of the time of all K devices in one step, predicted / "
        "measured. *Bubble* is what equal stages would wait too, *imbalance* what they would not; what recompute takes is "
        "measured by running the same plan at K = 2 without it. Of its own breakdown the paper prints that recompute took "
        "up to 23 % of a step, and load imbalance 3.2 % at K = 2.\n"
    )


def _breakdown_table(parts: pd.DataFrame) -> list[str]:
    titles = {(way, engine): title for title, way, engine in _WAYS}
    rows, models = [], []
    for x in parts.sort_values(["model", "way", "engine", "k"]).to_dict("records"):
        shown = [f"{percent_text(x[f'predicted_{p}'])} / {percent_text(x[f'measured_{p}'])}" for p in BREAKDOWN]
        model = "" if x["model"] in models else x["model"]
        models.append(x["model"])
        rows.append([model, titles[x["way"], x["engine"]], str(x["k"]), *shown])
    return markdown(["model", "", "K", *(_HEADS.get(part, part) for part in BREAKDOWN)], rows)


def _breakdown_reasons(table: pd.DataFrame, parts: pd.DataFrame) -> list[str]:
    best, few = parts[(parts.way == "best") & (parts.engine == "virtual")], parts.k.min()
    small, m = best[best.k == few], int(parts.m.max())
    bubbles = ", ".join(percent_text((k - 1) / (m + k - 1)) for k in sorted(set(best.k)))
    shares = recompute_of_backward(table).values()
    return [
        f"- **Recompute** took {_range(small.measured_recompute)} of the step at K = {few} (the paper: up to 23 %), "
        f"{percent_text(min(shares))} to {percent_text(max(shares))} of a backward that has it. A forward again beside a forward "
        "and a backward of two would be 25 % of what devices compute.",
        f"- **Imbalance** took {_range(small.measured_imbalance)} at K = {few} (the paper: 3.2 %) and "
        f"{_range(best[best.k == best.k.max()].measured_imbalance)} at K = {best.k.max()} with gplan's best: these models have few "
        "layers for so many devices, the paper's have more to choose from. A stage's single actions also vary from "
        "one to the next, and what others then wait for is counted here.",
        f"- **Bubble**: (K - 1) / (M + K - 1) is {bubbles} for K = {', '.join(map(str, sorted(set(best.k))))}; the measured parts "
        f"are {', '.join(percent_text(x) for x in best.sort_values(['model', 'k']).measured_bubble)} in the order of the table.",
        "- **Transfers and engine** on the virtual engine are what the link's figures say, laid out, not felt; the rows of two "
        "processes have the real ones. **Set-up** is what goes by before a step's first forward; loading data is in neither.\n",
    ]


def _range(shares: pd.Series[float]) -> str:
    return f"{percent_text(shares.min())} to {percent_text(shares.max())}"
