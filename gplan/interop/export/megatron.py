"""To Megatron-LM: `--pipeline-model-parallel-layout` and the arguments that go with it; the same string for verl.

Relies on NVIDIA/Megatron-LM: docs/user-guide/features/pipeline_parallel_layout.md and
megatron/core/transformer/pipeline_parallel_layer_layout.py (`parse_str_to_list`: E embedding, t transformer layer, m
multi-token prediction (MTP), L loss, "|" between stages, x*n and (...)*n repeat, one pair of parentheses deep;
`validate_layer_layout`: E first and once, L last and once, as many t as --num-layers, all m on the last stage of a rank
and not on the first rank); megatron/training/arguments.py for the other arguments;
megatron/core/transformer/transformer_block.py (`_checkpointed_forward`: uniform recompute in chunks of
--recompute-num-layers). A layout of v K stages puts stage s on rank s mod K and is run as interleaved 1F1B, with no
other argument for v (arguments.py allows none beside a layout, and wants K of 2 or more);
megatron/core/pipeline_parallel/schedules.py has the order (`get_pp_rank_microbatches`, `get_schedule_table`: in groups
of K micro-batches, of which the last must be whole). L stands for everything after the blocks: final norm, output layer
and loss.

Models with Mamba-2 layers are `HybridModel`s (megatron/core/models/hybrid/hybrid_layer_allocation.py, read at 0.20 of August 2026;
core 0.16 has `MambaModel`, with equal numbers of layers on every rank and one stage a device): `--hybrid-layer-pattern`
has a letter for each part of a block, "|" between stages, any number on each, and replaces --num-layers and the layout; v K stages
are interleaved as with a layout. Gated delta nets are an attention of GPT models
(models/gpt/experimental_attention_variant_module_specs.py). `--moe-layer-freq` and `--linear-attention-freq` take a list.

verl hands
`override_transformer_config` to Megatron-core's TransformerConfig (verl/workers/engine/megatron/transformer_impl.py).
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise
from math import gcd

from gplan.core import Plan, Profile
from gplan.core.errors import UsageError
from gplan.core.units import counted
from gplan.interop.export.requirements import Written, computed_widths, skipping_values
from gplan.interop.receiver_table import RECEIVERS
from gplan.interop.receivers import DecoderLayers, decoder_of, special_layers

HYBRID = "--hybrid-layer-pattern"
_PARTS = {  # of a block of a hybrid model, by its kind, in the letters of the pattern
    "MambaBlock": "M", "AttentionBlock": "*", "PerceptronBlock": "-", "ExpertsBlock": "E",
    "MambaDenseBlock": "M-", "MambaSparseBlock": "ME", "DenseBlock": "*-", "SparseBlock": "*E",
}  # fmt: skip
_ORDER_BY_FLAG = "tp-cp-ep-pp-dp"  # the one other order of groups that Megatron-LM's arguments can ask for
_TITLE = RECEIVERS["megatron"].title


def to_megatron(plan: Plan, profile: Profile | None) -> Written:
    """Arguments for a shell, one on a line."""
    decoder, widths = decoder_of(plan.layer_names, _TITLE, profile), computed_widths(profile)
    _check_prediction(plan, decoder)
    kinds = [profile.layers[i].kind for i in decoder.blocks] if profile is not None and widths else []
    num_parts = _num_blocks(plan, decoder)
    size = ("--pipeline-model-parallel-size", plan.num_devices)
    arguments: list[tuple[str, str | int]] = [("--num-layers", len(decoder.blocks)), *_kinds(kinds), size]
    if plan.num_devices > 1 or not widths:  # a layout is for two pipeline ranks or more
        arguments.append(("--pipeline-model-parallel-layout", layout_of(plan, decoder)))
    if "Mamba" in special_layers(profile):
        ends = [0, *accumulate(num_parts)]
        if strange := {*kinds} - _PARTS.keys():
            raise UsageError(f"{_TITLE}'s hybrid pattern has no letter for {min(strange)}; choose another trainer")
        stages = ["".join(map(_PARTS.__getitem__, kinds[first:end])) for first, end in pairwise(ends)]
        num_parts = [len(x) for x in stages]
        arguments = [(HYBRID, "|".join(stages)), size]
    arguments += [
        *([("--mtp-num-layers", len(decoder.prediction))] if decoder.prediction else []),
        *([("--seq-length", widths["sequence_length"])] if widths else []),
        ("--micro-batch-size", plan.microbatch_size),
        ("--global-batch-size", plan.batch_size),
        *_recompute(plan, num_parts),
        *[(f"--{x.replace('_', '-')}", number) for x, number in _widths(profile).items()],
    ]
    lines = [f"{name} {shlex.quote(str(value))}" for name, value in arguments]
    # Multi-token prediction reads the embedding's weight too, without tying the head.
    if profile is not None and not any({0, len(profile.layers) - 1} <= {*x.layers} for x in profile.tied_weights):
        lines.append("--untie-embeddings-and-output-weights")
    lines += _switches(plan, profile)
    return " \\\n".join(lines) + "\n", _notes(plan, profile, decoder)


def _widths(profile: Profile | None) -> dict[str, int]:
    """The sizes of parallel groups beside the pipeline, of a computed profile; those of experts where there are some."""
    widths, names = computed_widths(profile), {"tensor": "tensor_model", "context": "context"}
    if profile is not None and any("Sparse" in x.kind or "Experts" in x.kind for x in profile.layers):
        names |= {"expert": "expert_model", "expert_tensor": "expert_tensor"}
    return {f"{name}_parallel_size": widths[x] for x, name in names.items() if x in widths}


def _kinds(kinds: Sequence[str]) -> list[tuple[str, str | int]]:
    """Which blocks of a computed GPT model have experts, where not all have, and which have gated delta nets."""
    experts, delta = ["Sparse" in x for x in kinds], ["DeltaNet" in x for x in kinds]
    found: list[tuple[str, str | int]] = [("--moe-layer-freq", _list(experts))] if len({*experts}) > 1 else []
    if any(delta):
        found += [("--experimental-attention-variant", "gated_delta_net"), ("--linear-attention-freq", _list(delta))]
    return found


def _list(flags: Sequence[bool]) -> str:
    """Flags as Megatron-LM's list expression, with its period.

    >>> _list([False] + [True] * 45), _list([True, True, False] * 2)
    ('([0]*1+[1]*45)', '([1]*2+[0]*1)*2')
    """
    count = len(flags)
    period = next(x for x in range(1, count + 1) if not count % x and [*flags] == [*flags[:x]] * (count // x))
    runs = "+".join(f"[{int(x)}]*{len(list(run))}" for x, run in groupby(flags[:period]))
    return f"({runs})" + f"*{count // period}" * (count > period)


def _switches(plan: Plan, profile: Profile | None) -> list[str]:
    """The flags without which the costs do not hold, and the usual overlap of the replicas' collectives."""
    widths = computed_widths(profile)
    found = ["--bf16"] * (plan.precision.name == "mixed") + ["--sequence-parallel"] * (widths.get("tensor", 1) > 1)
    if widths.get("data", 1) * widths.get("context", 1) > 1:
        found += ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
    if widths.get("expert", 1) > 1:  # the tokens go by all-to-all, and experts multiply theirs together
        found += ["--moe-token-dispatcher-type alltoall", "--moe-grouped-gemm"]
    return found + ["--use-tp-pp-dp-mapping"] * (_order(profile) == _ORDER_BY_FLAG)


def _order(profile: Profile | None) -> str | None:
    """The order in which a computed profile places groups; None where it is the trainer's own."""
    return None if profile is None else dict(profile.model.settings).get("order")


def to_verl(plan: Plan, profile: Profile | None) -> Written:
    """Overrides for verl's command line: those of the actor; the reference model has the same under `ref`."""
    decoder = decoder_of(plan.layer_names, RECEIVERS["verl"].title, profile)
    _check_prediction(plan, decoder)
    actor = "actor_rollout_ref.actor.megatron"
    overrides = {"pipeline_model_parallel_layout": f'"{layout_of(plan, decoder)}"'}
    if decoder.prediction:
        overrides["mtp_num_layers"] = str(len(decoder.prediction))
    for name, value in _recompute(plan, _num_blocks(plan, decoder)):
        overrides[name.removeprefix("--").replace("-", "_")] = str(value)
    sizes = {"pipeline_model_parallel_size": plan.num_devices, **_widths(profile)}
    lines = [f"{actor}.{name}={size}" for name, size in sizes.items()]
    if plan.num_stages > plan.num_devices:
        lines.append(f"{actor}.virtual_pipeline_model_parallel_size={plan.num_stages // plan.num_devices}")
    lines += [shlex.quote(f"+{actor}.override_transformer_config.{name}={value}") for name, value in overrides.items()]
    notes = (
        f"verl chooses the number of micro-batches by its own batch sizes; the plan has {plan.num_microbatches} of "
        f"{plan.microbatch_size} samples",
        _letters(plan, decoder),
    )
    return " \\\n".join(lines) + "\n", notes


def _check_prediction(plan: Plan, decoder: DecoderLayers) -> None:
    """Raise UsageError for multi-token prediction where Megatron does not take it."""
    if not decoder.prediction:
        return
    stage = next(x for x in plan.stages if decoder.prediction.start < x.end_layer)
    if plan.num_devices > 1 and stage.on_device == 0:
        raise UsageError(
            f"multi-token prediction is on stage {stage.index}, which is on rank 0; {_TITLE} takes it on any other rank; plan again "
            "with another --k, or keep it with the head (--keep-together)"
        )
    if plan.num_stages - stage.index > plan.num_devices:
        raise UsageError(
            f"multi-token prediction is on stage {stage.index}; {_TITLE} takes it on the last stage of a rank, from "
            f"{plan.num_stages - plan.num_devices}; keep it with the head (--keep-together)"
        )


def layout_of(plan: Plan, decoder: DecoderLayers) -> str:
    """The stages in Megatron's letters, runs of equal ones in parentheses."""
    counts = [decoder.counts(x.first_layer, x.end_layer) for x in plan.stages]
    return _layout(["t" * blocks + "m" * predictions for blocks, predictions in counts])


def _layout(stages: Sequence[str]) -> str:
    """
    >>> _layout(["ttt", "tt", "tt", "tt", ""]), _layout(["ttttt"]), _layout(["tt", "tm"])
    ('Et*3|(tt|)*3L', 'Et*5L', 'Ett|tmL')
    """
    runs_of = [[(x, len(list(run))) for x, run in groupby(stage)] for stage in stages]
    written = ["".join(f"{x}*{count}" if count > 2 else x * count for x, count in runs) for runs in runs_of]
    written[0] = "E" + written[0]
    runs = [(stage, len(list(run))) for stage, run in groupby(written[:-1])]
    before = "".join(f"({stage}|)*{length}" if length > 1 else f"{stage}|" for stage, length in runs)
    return f"{before}{written[-1]}L"


def _num_blocks(plan: Plan, decoder: DecoderLayers) -> list[int]:
    """Blocks of each stage."""
    return [decoder.counts(x.first_layer, x.end_layer)[0] for x in plan.stages]


def _recompute(plan: Plan, num_parts: Sequence[int]) -> list[tuple[str, str | int]]:
    """Recompute in chunks of blocks, or of parts of a hybrid model, whose size divides every stage; one chunk per stage if stages are equal."""
    if plan.recompute == "never":
        return []
    return [
        ("--recompute-granularity", RECEIVERS["megatron"].recompute[plan.recompute]),
        ("--recompute-method", "uniform"),
        ("--recompute-num-layers", gcd(*num_parts)),
    ]


def _letters(plan: Plan, decoder: DecoderLayers) -> str:
    names = plan.layer_names
    return f"E stands for {', '.join(names[: decoder.blocks.start])}; L for {', '.join(names[decoder.head.start :])} and the loss"


def _notes(plan: Plan, profile: Profile | None, decoder: DecoderLayers) -> list[str]:
    special, widths = special_layers(profile), computed_widths(profile)
    is_hybrid, least = "Mamba" in special, f" (at least {widths['sequence_length']})" if widths else ""
    has_layout = not is_hybrid and (plan.num_devices > 1 or not widths)
    hybrid = (
        f"{HYBRID} with | between stages needs a Megatron-LM newer than core 0.16, which puts equal numbers of layers on all ranks; read in "
        "the source of the newer one, not run"
    )
    notes = [
        *[hybrid] * is_hybrid,
        *[_letters(plan, decoder)] * has_layout,
        "the flags of the model stand beside these, such as --hidden-size, --num-attention-heads, --group-query-attention, --swiglu, "
        f"--num-experts or --max-position-embeddings{least}, and those of data and optimizer",
        f"{counted(plan.num_microbatches, 'micro-batch')} a pipeline by the batch sizes and data-parallel size {plan.num_replicas}; one has "
        f"{counted(plan.num_devices, 'rank')}, times those of tensor and context",
        *["Megatron-LM calls the layout experimental"] * has_layout,
    ]
    if widths:
        notes.append(
            "the loss is counted as Megatron-LM computes it by default, which keeps logits in float32; --cross-entropy-loss-fusion is "
            "faster and takes 4 bytes more for each logit in its backward; with --cross-entropy-fusion-impl te newer versions refuse it"
        )
    if "DeltaNet" in special and widths["context"] > 1:
        notes.append("gated delta nets with context parallelism need a Megatron-LM after core 0.16")
    if "--overlap-grad-reduce" in _switches(plan, profile):
        notes.append(
            "the plan counts the collectives of replicas behind the last backward; the two overlap flags hide some of them, so that a "
            "step may be shorter"
        )
    if (order := _order(profile)) not in (None, _ORDER_BY_FLAG):
        notes.append(
            f"Megatron-LM has no argument for the order {order}: pass it to initialize_model_parallel as order="
        )
    blocks = [] if profile is None or widths else [profile.layers[i] for i in decoder.blocks]  # measured: whole ones
    kinds = dict.fromkeys(f"{x.kind} of {x.num_parameters} parameters" for x in blocks)
    if len(kinds) > 1:
        notes.append(f"t stands for blocks of several kinds ({', '.join(kinds)}): configure the model so")
    makers = skipping_values(plan, profile)
    if makers:
        notes.append(f"every stage of Megatron-LM computes itself what the plan sends on from {', '.join(makers)}")
    if plan.recompute == "always":
        notes.append("Megatron-LM recomputes the blocks only, not embeddings and head")
    return notes
