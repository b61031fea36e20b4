"""To Megatron-LM: `--pipeline-model-parallel-layout` and the arguments that go with it.

Relies on NVIDIA/Megatron-LM: docs/user-guide/features/pipeline_parallel_layout.md and
megatron/core/transformer/pipeline_parallel_layer_layout.py (`parse_str_to_list`: E embedding, t transformer layer, m
MTP layer, L loss, "|" between stages, x*n and (...)*n repeat, one pair of parentheses deep; `validate_layer_layout`: E
first and once, L last and once, as many t as --num-layers); megatron/training/arguments.py for the other arguments;
megatron/core/transformer/transformer_block.py (`_checkpointed_forward`: uniform recompute in chunks of
--recompute-num-layers). A layout of v K stages puts stage s on rank s mod K and is run as interleaved 1F1B, with no
other argument for v (arguments.py allows none beside a layout, and wants K of 2 or more);
megatron/core/pipeline_parallel/schedules.py has the order (`get_pp_rank_microbatches`, `get_schedule_table`: in groups
of K micro-batches, of which the last must be whole). L stands for everything after the blocks: final norm, output layer
and loss.
"""

from __future__ import annotations

import re
import shlex
from itertools import groupby
from math import gcd

from gplan.core import Plan, Profile
from gplan.core.errors import UsageError
from gplan.interop.export import requirements
from gplan.interop.export.requirements import Export

_RECEIVER = "Megatron-LM"
_ENTRY = re.compile(r"(.+)\.(\d+)")  # of a list of modules


def to_megatron(plan: Plan, profile: Profile | None) -> Export:
    """Arguments for a shell, one on a line.

    Raises UsageError unless the layers are embeddings, one list of identical blocks and a head, and no cut is within the
    embeddings or the head.
    """
    requirements.check_order(plan, profile, receiver=_RECEIVER)
    requirements.check_layers_are_modules(plan, receiver=_RECEIVER)
    _check_schedule(plan)
    blocks = _blocks(plan.layer_names)
    _check_whole(plan, blocks)
    _check_like(plan, profile, blocks)
    counts = [len(range(max(x.first_layer, blocks.start), min(x.end_layer, blocks.stop))) for x in plan.stages]
    arguments = [
        ("--num-layers", len(blocks)),
        ("--pipeline-model-parallel-size", plan.num_devices),
        ("--pipeline-model-parallel-layout", _layout(counts)),
        ("--micro-batch-size", plan.microbatch_size),
        ("--global-batch-size", plan.batch_size),
        *_recompute(plan, counts),
    ]
    lines = [f"{name} {shlex.quote(str(value))}" for name, value in arguments]
    if profile is not None and not profile.shared_weights:
        lines.append("--untie-embeddings-and-output-weights")
    return Export(format="megatron", text=" \\\n".join(lines) + "\n", notes=_notes(plan, profile, blocks))


def _check_schedule(plan: Plan) -> None:
    """Raise UsageError unless the schedule is 1F1B, or interleaved 1F1B with M a multiple of K."""
    requirements.rule_name(plan, {"1f1b": "1F1B", "interleaved-1f1b": "interleaved 1F1B"}, receiver=_RECEIVER)
    num_devices, num_microbatches = plan.num_devices, plan.num_microbatches
    if plan.num_stages == num_devices:
        return
    if num_devices == 1:
        raise UsageError(
            f"the plan has {plan.num_stages} stages on one device; Megatron-LM interleaves on 2 devices or more; plan again "
            "with --schedule 1f1b"
        )
    if num_microbatches % num_devices:
        raise UsageError(
            f"the plan interleaves {num_microbatches} micro-batches on {num_devices} devices; Megatron-LM does so in groups of "
            f"{num_devices}; plan again with another --microbatches, or with --schedule 1f1b"
        )


def _blocks(names: tuple[str, ...]) -> range:
    """The layers of the one list of blocks; layers before it are E, layers after it L."""
    entries = [(i, match[1], int(match[2])) for i, name in enumerate(names) if (match := _ENTRY.fullmatch(name))]
    lists = list(dict.fromkeys(name for _, name, _ in entries))
    if len(lists) != 1:
        found = (
            f"blocks in {len(lists)} lists ({', '.join(lists)})" if lists else "no blocks such as layers.0, layers.1"
        )
        raise _refusal(f"the plan has {found}")
    blocks = range(entries[0][0], entries[-1][0] + 1)
    if [number for _, _, number in entries] != list(range(len(blocks))):
        raise _refusal(f"other layers stand between the blocks {names[blocks[0]]} and {names[blocks[-1]]}")
    if blocks.start == 0 or blocks.stop == len(names):
        raise _refusal(f"no layer stands {'before' if blocks.start == 0 else 'after'} the blocks")
    return blocks


def _check_whole(plan: Plan, blocks: range) -> None:
    """Raise UsageError for a cut within the embeddings or the head."""
    for cut in plan.cuts:
        if not blocks.start <= cut <= blocks.stop:
            part, letter = ("embeddings", "E") if cut < blocks.start else ("head", "L")
            raise UsageError(
                f"the plan cuts before {plan.layer_names[cut]}, within the {part}; Megatron-LM's {letter} cannot be cut; keep "
                "it together with --keep-together and plan again"
            )


def _check_like(plan: Plan, profile: Profile | None, blocks: range) -> None:
    """Raise UsageError unless the blocks have one class and size, and each output goes to the next layer only."""
    if profile is None:
        return
    like = {(profile.layers[i].kind, profile.layers[i].num_parameters) for i in blocks}
    if len(like) > 1:
        kinds = " and ".join(f"{kind} of {size} parameters" for kind, size in sorted(like)[:2])
        raise _refusal(f"the blocks differ: {kinds}")
    made = [(x.producer, x.consumers[-1]) for x in profile.values if x.producer is not None]
    skips = [maker for maker, last_reader in made if maker in blocks and last_reader > maker + 1]
    if skips:
        raise _refusal(f"the output of {profile.layers[skips[0]].name} is read beyond the next layer")
    shared = [x.name for x in profile.shared_weights if any(layer in blocks for layer in x.layers)]
    if shared:
        raise _refusal(f"{shared[0]} is shared by blocks")


def _layout(counts: list[int]) -> str:
    """The stages in Megatron's letters, runs of equal ones in parentheses.

    >>> _layout([3, 2, 2, 2, 0]), _layout([5])
    ('Et*3|(tt|)*3L', 'Et*5L')
    """
    stages = [_repeated(count) for count in counts]
    stages[0] = "E" + stages[0]
    runs = [(stage, len(list(run))) for stage, run in groupby(stages[:-1])]
    before = "".join(f"({stage}|)*{length}" if length > 1 else f"{stage}|" for stage, length in runs)
    return f"{before}{stages[-1]}L"


def _repeated(count: int) -> str:
    return f"t*{count}" if count > 2 else "t" * count


def _recompute(plan: Plan, counts: list[int]) -> list[tuple[str, str | int]]:
    """Recompute in chunks of blocks whose size divides every stage; one chunk per stage if stages are equal."""
    if requirements.recompute_name(plan, {"never": "", "always": "full"}, receiver=_RECEIVER) == "":
        return []
    return [
        ("--recompute-granularity", "full"),
        ("--recompute-method", "uniform"),
        ("--recompute-num-layers", gcd(*counts)),
    ]


def _notes(plan: Plan, profile: Profile | None, blocks: range) -> tuple[str, ...]:
    names = plan.layer_names
    notes = [
        f"E stands for {', '.join(names[: blocks.start])}; L for {', '.join(names[blocks.stop :])} and the loss",
        f"{plan.num_microbatches} micro-batches follow from the batch sizes with {plan.num_replicas * plan.num_devices} ranks, "
        f"data-parallel size {plan.num_replicas} and tensor-parallel size 1",
        "Megatron-LM calls this argument experimental",
    ]
    makers = requirements.skipping_values(plan, profile)
    if makers:
        notes.append(f"every stage of Megatron-LM makes anew what the plan sends on from {', '.join(makers)}")
    if plan.recompute == "always":
        notes.append("Megatron-LM recomputes the blocks only, not embeddings and head")
    return tuple(notes)


def _refusal(found: str) -> UsageError:
    return UsageError(
        f"{found}; Megatron-LM's layout can express embeddings, then one list of identical blocks, then a head; use another format"
    )
