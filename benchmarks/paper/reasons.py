"""What is said beside the tables: how they were made, and where each gap to the paper comes from,
with the tables' own numbers."""

from __future__ import annotations

import pandas as pd

from paper.published import GB, GIB

REASONS = {
    "head": """\
# GPipe's own tables, recomputed

`python benchmarks/gpipe_paper.py`: the tables of Huang et al., *GPipe* (NeurIPS 2019, arXiv 1811.06965v5), beside what
gplan computes for the same models. Nothing was fitted, and outside the sections "Measured here" and "Beside its peers"
nothing was measured: the models are built on the meta device, their work is counted operation by operation, and a roofline
with assumed efficiencies (`profiler/analytic/hardware.toml`: `tpu-v2`, `tpu-v3`, `p100`) makes seconds of it. A ratio is
gplan's figure over the paper's. Batches are those of the paper's Table 1 (128 images, 32 sequences), all in float32.
""",
    "counts": """\
Every count that the paper gives with its definition comes out as printed. The translation models T(L, H, A) do with heads
64 wide, whatever their number, and a vocabulary of 64000 for both languages, which the paper does not print: with
heads of 1024 / A, T(12, 16384, 32) would be an eighth smaller than T(24, 8192, 16), and the paper gives both 1.3 B.
AmoebaNet-B(18, 512) cannot be rebuilt from the paper: it names the cells by their letter and prints neither them nor what was
changed around them for 480x480 images. What is known are 18 normal cells, 512 filters and the count; with the cells of
AmoebaNet-D that size has 481 M parameters, 14 % fewer than the 557 M (a count does not depend on the image's size).
""",
    "throughput": """\
Throughput of one mini-batch under the GPipe schedule with every micro-batch recomputed, over that of the first cell of the
same way to plan. *GPipe's rule* balances the FLOPs of the layers' forwards, as GPipe's code does; *gplan's best* is proven
to have the shortest step. *Operations* cuts blocks apart too (`--granularity op`). *Recomputing ahead* is the rule's plan
if a recompute did not wait for the gradient, as the paper says of GPipe ("scheduled earlier, without waiting for the gradients
from earlier layers"); gplan's engine and torch's checkpoint wait. torchgpipe's row is what its documentation gives for
AmoebaNet-D(18, 256) on P40s, balanced by hand: a second measurement of the same model.
""",
    "foot": """\
## What is in this folder

`counts.csv`, `largest.csv`, `memory.csv` and `throughput.csv` have every figure above and more: seconds, cuts, imbalance,
bubble, the shares of recompute and optimizer. Sections `measured.md` and `peers.md`, where they lie beside this file, stand
above this one.
""",
}


def largest_reasons(table: pd.DataFrame) -> list[str]:
    """Why the largest models are larger or smaller than the paper's."""
    pipelined = table[table.is_pipelined].assign(ratio=table.found_parameters / table.exact_parameters)
    many = pipelined[(pipelined.model == "Transformer") & (pipelined.num_devices > 1)]
    paper_way, engine_way = (many[many.bytes_per_parameter == x].ratio for x in (12, 16))
    one = (
        pipelined[pipelined.column == "Pipeline-1"]
        .query("model == 'Transformer' and bytes_per_parameter == 12")
        .iloc[0]
    )
    images = pipelined[pipelined.model == "AmoebaNet-D"]
    images_paper, images_engine = (images[images.bytes_per_parameter == x].ratio for x in (12, 16))
    return [
        f"""\
- **Transformer-L on 8, 32 and 128** comes out {_span(paper_way)} times as large as printed with the paper's 12 bytes a parameter,
  and {_span(engine_way)} times with the 16 that training holds when gradients are accumulated over micro-batches: weight, gradient,
  mean square, momentum. The paper's 12 leave the gradient out. Its sizes need not be the largest that fit, either: they
  are about 13 layers an accelerator throughout.
- **On one accelerator** gplan fits {one.found_layers} layers where the paper has {one.num_layers}. Its engine computes the loss behind each forward, so
  under GPipe the loss's tensors of all 32 micro-batches wait for their backwards, 4 GiB of the 16; GPipe recomputes the
  softmax with its cell.
- **Fused attention** keeps no scores and fits more layers; the accelerators of the paper had none.
- **Naive-1** does not fit as printed, in either model: a whole batch of 32 sequences, or of 128 images, keeps several times the memory
  in float32 by what torch keeps for a backward. See the next table.
- **AmoebaNet-D** comes out {_span(images_paper)} times as large as printed with 12 bytes and {_span(images_engine)} times with 16. Depths of 18, 36 and 72 and widths in steps of 32 were tried;
  the paper does not say what it tried.
"""
    ]


def memory_reasons(table: pd.DataFrame) -> list[str]:
    """Why the paper's sizes take more or less activation memory here."""
    naive = table[(table.model == "AmoebaNet-D") & ~table.is_pipelined].iloc[0]
    deep = table[(table.model == "AmoebaNet-D") & (table.num_devices == 8)].iloc[0]
    kept = (deep.buffer_bytes + deep.checkpoint_bytes) / GB
    wide = table[(table.model == "Transformer") & (table.num_devices == 128)].iloc[0]
    each = wide.activation_memory / wide.num_layers * 1024
    return [
        f"""\
- **An erratum.** In print the Transformer's Naive-1 column has its two memory rows swapped: 11.7 G of parameters and 3.15 G of
  activations, where 282.2 M parameters of 12 bytes need 3.15 GiB. They are set right here.
- **The units differ.** 12 bytes for each parameter come to the printed figures in decimal GB for AmoebaNet and in GiB for the
  Transformer. Two of AmoebaNet's do not: 1.05 (12 bytes each need 0.98) and 24.62 (22.14), and so the article's "25 times" is
  22 times by its own parameter counts, 1.8 B over 82 M.
- **Activations** hang on what the compiler keeps. A layer of the paper's largest Transformer takes {each:.0f} MiB, boundaries and
  all; gplan, with what torch keeps of a layer and one sequence in flight, has {wide.activation_bytes / GIB / wide.num_layers * 1024:.0f}
  MiB. The paper's micro-batch size for this table is not printed.
- **Every pipelined AmoebaNet of the paper fits** its accelerators here too, and so do the Transformers on 8, 32 and 128. The
  partition shown is the fastest of those that fit, so the fullest accelerator may be nearly full.
- **AmoebaNet on 4 and 8 accelerators** takes more here: of the {deep.activation_bytes / GB:.1f} GB of Pipeline-8 up to {kept:.1f} GB are tensors at
  the cuts, of which gplan's engine holds four for each micro-batch (received and sent, both ways) where GPipe holds the
  input of each cell.
- **Naive-1** of AmoebaNet: the printed 6.26 GB are {6.26e9 / 128 / 1e6:.0f} MB an image; in float32, torch keeps {naive.activation_bytes / 128 / 1e6:.0f}
  MB. bfloat16 would halve that, and a compiler that keeps no copies around batch norm and ReLU could do more; which it was the
  paper does not say.
"""
    ]


def throughput_reasons(table: pd.DataFrame) -> list[str]:
    """Why throughputs differ from the paper's."""
    whole = _row(table, "Transformer-48", "layers", 8, 32)
    fine = table[(table.model == "Transformer-48") & (table.cut == "operations") & (table.m == 32)]
    small = _row(table, "AmoebaNet-D(18, 256)", "layers", 8, 32)
    return [
        f"""\
- **The Transformer's M = 32 rows** are within {_farthest(fine.best / fine.paper)} of the paper with cuts between operations (and within
  {_farthest(fine.rule / fine.paper)} by the rule). Between whole layers K = 8 reaches only {whole.best:.2f}: 48 blocks and a head that takes as long
  as one do not divide by 8, some stage has 7 blocks, {_percent(whole.imbalance)} above the mean. Such stages could give
  {_bound(whole):.2f} even if small micro-batches lost nothing, so at one batch size the paper's 6.3 did not come from them.
- **The M = 4 row of the Transformer is no target.** 1.7, 3.2, 4.8 are more than equal stages and free transfers could give
  over the M = 1 cell, 1.60, 2.29, 2.91: the batch was another one in different cells ("adjusted to fit memory if necessary"). It
  had to be: Table 1 has 1.04 GiB of parameters and activations a layer, with which 24 layers need 25 of an accelerator's 16 GiB.
- **The M = 1 row** rises with K in print. With one micro-batch nothing overlaps, and gplan gives 1 throughout. Recomputing ahead hides
  all but the last stage's recompute: {_cells(table, "Transformer-48", "operations", 1)} for the Transformer, {_cells(table, "AmoebaNet-D(18, 256)", "layers", 1)} for AmoebaNet.
  The rest of the rise is not explained; more accelerators have room for a larger batch, which a roofline does not reward.
- **AmoebaNet-D(18, 256)** is a matter of partition: its cells differ in bytes moved per FLOP, and stages with equal FLOPs are
  up to {_percent(small.rule_imbalance)} above the mean in seconds at K = 8, M = 32. By the rule, recomputing ahead, gplan comes to
  {small.ahead:.2f} where the paper has {small.paper:g}; its best partition would give {small.best:.2f}, and torchgpipe measured
  {small.torchgpipe:.2f} with its hand-made one. The M = 4 row is {_ratios(table, "AmoebaNet-D(18, 256)", 4)} times the paper's by
  the same reckoning: a roofline has no loss of efficiency in small micro-batches, and the batch may have differed.
- **Links** hardly matter: GPipe's step has the transfers of a single micro-batch in it, the others overlap with
  computing (and do not queue, as the simulator has it): at most {_percent(table.transfer_share.max())} of any step here, as
  the paper finds too (Table 3). By the rule, the Transformer cut between operations, Table 3 is within {_farthest(_gpu(table).rule / _gpu(table).paper)} of the paper.
- **Recompute** is {_percent(small.recompute_share)} of the time that accelerators compute here, a forward beside a
  forward, a recompute and a backward of two; the paper measured up to 23 % of a step.
"""
    ]


def _gpu(table: pd.DataFrame) -> pd.DataFrame:
    """Table 3, the Transformer by operations."""
    return table[(table.table == "Table 3") & ((table.cut == "operations") | table.model.str.startswith("Amoeba"))]


def _row(table: pd.DataFrame, model: str, cut: str, k: int, m: int) -> pd.Series[float]:
    row: pd.Series[float] = table[(table.model == model) & (table.cut == cut) & (table.k == k) & (table.m == m)].iloc[0]
    return row


def _cells(table: pd.DataFrame, model: str, cut: str, m: int) -> str:
    part = table[(table.model == model) & (table.cut == cut) & (table.m == m)]
    return ", ".join(f"{x:.2f}" for x in part.ahead)


def _ratios(table: pd.DataFrame, model: str, m: int) -> str:
    part = table[(table.model == model) & (table.m == m)]
    return _span(part.ahead / part.paper)


def _span(values: pd.Series[float]) -> str:
    low, high = f"{values.min():.2f}", f"{values.max():.2f}"
    return low if low == high else f"{low} to {high}"


def _farthest(ratios: pd.Series[float]) -> str:
    return _percent(max(abs(ratios - 1)))


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.02 else f"{100 * share:.1f} %"


def _bound(row: pd.Series[float]) -> float:
    """The most that stages with this imbalance give over one micro-batch: GPipe's step,
    the same work in every sample."""
    largest_share = (1 + row.imbalance) / row.k
    return float(row.m / (1 + (row.m - 1) * largest_share))
