"""Layouts of other trainers read back: the text that a receiver takes, to the cuts of a profile.

A layout is what the receiver itself reads (Megatron's string, torchtitan's and Automodel's lists, DeepSpeed's boundaries,
the counts of vLLM, SGLang and torchgpipe, split points of torch), alone or within the file that holds it: an export of
gplan, a shell script with the arguments, a Python module with the literal. Batch sizes and recompute are read beside it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import cast

from gplan.core import Profile, RecomputeMode
from gplan.core.errors import UsageError
from gplan.interop.export.module_lists import ROTARY
from gplan.interop.receiver_table import RECEIVERS
from gplan.interop.receivers import check_granularity, child_name, decoder_of, modules_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A partition of a profile as a receiver has it, and what the text says beside it of how it is run."""

    cuts: tuple[int, ...]  # the first layer of each stage but stage 0
    numbers: Mapping[str, int]  # by the names of `_NUMBERS`
    recompute: RecomputeMode | None
    left_out: tuple[str, ...]  # sentences on what the plan does not have

    @property
    def num_stages(self) -> int:
        """On all devices together."""
        return len(self.cuts) + 1


def read_layout(text: str, profile: Profile, *, receiver: str) -> Layout:
    """The layout in a text, for the layers of a profile.

    Raises UsageError for a text that holds none, a count that is not the model's, or layers that the receiver does not
    take, with the place and what was expected.
    """
    if receiver not in _READERS:
        why = "it cuts the blocks itself" if receiver in RECEIVERS else "it is not known"
        raise UsageError(f"layouts of {receiver!r} cannot be read, {why}; expected one of {', '.join(_READERS)}")
    if receiver in ("megatron", "verl"):
        text = with_variables(text)
    if not text.strip():
        raise UsageError(f"the layout is empty; expected the text that {RECEIVERS[receiver].title} reads")
    names = tuple(layer.name for layer in profile.layers)
    check_granularity(receiver, profile.model, profile.granularity, names[0])
    ends = _READERS[receiver](text, names)
    for stage, (first, end) in enumerate(zip((0, *ends[:-1]), ends, strict=True)):
        if first >= end:
            raise UsageError(f"stage {stage} of the layout is empty; a stage of gplan has at least one layer")
    recompute, left_out = _recompute(text)
    return Layout(cuts=tuple(ends[:-1]), numbers=_numbers_beside(text), recompute=recompute, left_out=left_out)


# How a pipeline is run, where a file has it beside the layout

_NUMBERS = {
    "num_devices": r"pipeline_(?:model_)?parallel_(?:size|degree)|pp_size|num_stages",
    "microbatch_size": r"(?:train_)?micro_batch_size(?:_per_gpu)?|pipeline_parallel_microbatch_size|pp_microbatch_size",
    "num_microbatches": "gradient_accumulation_steps|n_microbatches|num_pp_microbatches|chunks",
    "pipeline_batch": "local_batch_size|pp_batch_size",  # samples of a step in one pipeline
    "batch_size": "global_batch_size|train_batch_size",
    "tensor": "tensor_(?:model_)?parallel_(?:size|degree)|tp_size",
    "context": "context_parallel_(?:size|degree)|cp_size",
    "expert": "expert_(?:model_)?parallel_(?:size|degree)|ep_size",
    "sequence_length": "seq_length|sequence_length|seq_len",
}
"""The names of numbers in the files of all receivers, with _ for -."""
_AFTER = r"[\"']?[\s=:\\]+[\"']?"  # between a name and its value


def with_variables(text: str) -> str:
    """A shell script with the values of the variables that it sets to numbers or words, without comments.

    >>> with_variables("MBS=2  # samples\\n--micro-batch-size ${MBS} --seq-length $LENGTH")
    'MBS=2\\n--micro-batch-size 2 --seq-length $LENGTH'
    """
    plain = re.sub(r"[ \t]*(?:(?<=\s)|^)#.*", "", text, flags=re.MULTILINE)
    found = dict(re.findall(r"^\s*(?:export\s+)?(\w+)=[\"']?([\w.]+)[\"']?\s*$", plain, re.MULTILINE))
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda x: found.get(x[1] or x[2], x[0]), plain)


def _numbers_beside(text: str) -> dict[str, int]:
    plain, found = text.replace("-", "_"), dict[str, int]()
    for name, keys in _NUMBERS.items():
        if match := re.search(rf"(?<![a-z])(?<![a-z]_)(?:{keys}){_AFTER}(\d{{1,9}})\b", plain):
            found[name] = int(match[1])
    return found


def _recompute(text: str) -> tuple[RecomputeMode | None, tuple[str, ...]]:
    """What a file recomputes, as the mode of a plan, with sentences on what is different there."""
    found = dict(re.findall(rf"(recompute_\w+){_AFTER}(\w+)", text.replace("-", "_")))
    given = ", ".join(f"--{x.replace('_', '-')} {y}" for x, y in found.items())
    if "recompute_activations" in text.replace("-", "_") or found.get("recompute_granularity") == "selective":
        return "never", (
            f"{given or '--recompute-activations'} is left out: a plan recomputes whole stages or, as here, nothing",
        )
    if found.get("recompute_method") == "block":
        return "never", (
            f"{given} is left out: a plan recomputes whole stages (--recompute always) or, as here, nothing",
        )
    if "recompute_granularity" in found:
        return "always", (
            f"{given} recomputes in chunks of blocks, the plan whole stages: time and memory will differ",
        )
    if "SelectiveAC" in text:
        return "never", (
            "selective activation checkpointing is left out: a plan recomputes whole stages or, as here, nothing",
        )
    if re.search(r"FullAC|activation_checkpoint_interval\W+[1-9]", text):
        return "always", ()
    mode = re.search(r"\bcheckpoint\s*=\s*[\"'](always|except_last|never)", text)
    return (cast(RecomputeMode, mode[1].replace("_", "-")) if mode else None), ()


# Megatron-LM and verl

_LAYOUT = re.compile(r"parallel[-_]layout[=\s]*[\"'\\]*([EtmL|()*,\d]+)")
_ACCOUNTS = "account-for-{}-in-pipeline-split"  # for the embedding or the loss, which counts as a block
_SIZES = re.compile(
    r"--(pipeline-model-parallel-size|decoder-(?:first|last)-pipeline-num-layers|account-for-\w+-in-pipeline-split"
    r"|num-layers-per-virtual-pipeline-stage|num-virtual-stages-per-pipeline-rank)(?:[=\s\\]+([^-\s]\S*))?"
)
_MOST_LETTERS = 100_000  # far more than any model has layers
_LETTERS = {"E": "embedding", "t": "transformer layer", "m": "multi-token prediction", "L": "loss"}


def stage_letters(layout: str) -> tuple[str, ...]:
    """The letters of every stage of Megatron's layout, repetitions written out.

    >>> stage_letters("Et*3|(tt|)*2,m|L")
    ('Ettt', 'tt', 'tt', 'm', 'L')
    """
    plain = layout.replace(",", "").replace(" ", "")
    for pattern in (r"\(([^()]*)\)\*(\d{1,9})", r"([A-Za-z|])\*(\d{1,9})"):
        num_letters = sum(len(x[1]) * int(x[2]) for x in re.finditer(pattern, plain))
        if num_letters > _MOST_LETTERS:
            raise UsageError(
                f"repetitions in the layout write {num_letters:,} letters; expected as many as the model has layers"
            )
        plain = re.sub(pattern, lambda x: x[1] * int(x[2]), plain)
    for place, letter in enumerate(plain):
        if letter not in {*_LETTERS, "|"}:
            known = ", ".join(f"{x} ({word})" for x, word in _LETTERS.items())
            raise UsageError(
                f"{letter!r} at place {place} of the layout written out, {plain[max(0, place - 8) : place + 8]!r}, is no layer; expected "
                f"{known}, | between stages, x*n or (x|)*n, without parentheses in parentheses"
            )
    return tuple(plain.split("|"))


def _megatron(text: str, names: Sequence[str]) -> tuple[int, ...]:
    title = RECEIVERS["megatron"].title
    found = _LAYOUT.search(text)
    decoder = decoder_of(names, title)
    if not found and (sizes := dict(_SIZES.findall(text.replace("_", "-")))).get("pipeline-model-parallel-size"):
        return _block_ends(_first_and_last(sizes, len(decoder.blocks)), names, title)
    stages = stage_letters(found[1] if found else text.strip().strip("\"'"))
    letters = "".join(stages)
    _check_count(letters, "t", len(decoder.blocks))
    _check_count(letters, "m", len(decoder.prediction))
    expected = "E" + "t" * len(decoder.blocks) + "m" * len(decoder.prediction) + "L"
    if letters != expected:
        place = next(i for i, pair in enumerate(zip(f"{letters} ", f"{expected} ", strict=False)) if pair[0] != pair[1])
        raise UsageError(
            f"layer {place} of the layout is {letters[place : place + 1] or 'missing'!r}; expected {expected[place : place + 1] or 'its end'!r}: one E "
            "first, every t, every m, one L last"
        )
    num_layers = {"E": len(decoder.embeddings), "t": 1, "m": 1, "L": len(decoder.head)}
    return tuple(accumulate(sum(num_layers[letter] for letter in stage) for stage in stages))


def _first_and_last(sizes: Mapping[str, str], num_blocks: int) -> list[int]:
    """Blocks of each stage by the arguments from before layouts: equally many, the first and last as given."""
    for name, value in sizes.items():
        if "virtual" in name:
            raise UsageError(
                f"--{name} gives every rank several stages; expected a layout: --pipeline-model-parallel-layout"
            )
        if not name.startswith("account") and not re.fullmatch(r"[1-9]\d{0,4}", value):
            raise UsageError(f"--{name} is {value or 'without a value'}; expected a whole number of at least 1")
    num_stages = int(sizes["pipeline-model-parallel-size"])
    given, others = [0] * num_stages, [0] * num_stages  # others: what counts as a block and is none
    for name, part, place in (("first", "embedding", 0), ("last", "loss", -1)):
        given[place] = int(sizes.get(f"decoder-{name}-pipeline-num-layers", given[place]))
        others[place] += given[place] == 0 and _ACCOUNTS.format(part) in sizes
    if not (rest := given.count(0)):
        return given
    share, left = divmod(num_blocks + sum(others) - sum(given), rest)
    if left or share < 1:
        raise UsageError(
            f"{num_blocks} blocks on {num_stages} stages leave {num_blocks + sum(others) - sum(given)} for {rest} stages; "
            "expected equally many on each: change --decoder-first-pipeline-num-layers or give a layout"
        )
    return [x or share - y for x, y in zip(given, others, strict=True)]


def _check_count(letters: str, letter: str, expected: int) -> None:
    found = letters.count(letter)
    if found != expected:
        hint = f"; add {letter * (expected - found)}" if 0 < expected - found < 5 else ""
        raise UsageError(f"the layout has {found} {letter} ({_LETTERS[letter]}); the profile has {expected}{hint}")


# Lists of modules: torchtitan and Automodel


def _module_lists(receiver: str, rename: Callable[[str], str]) -> Callable[[str, Sequence[str]], tuple[int, ...]]:
    def reader(text: str, names: Sequence[str]) -> tuple[int, ...]:
        title = RECEIVERS[receiver].title
        lists = _literal(
            text, ("MODULES", "module_fqns_per_model_part", "pipeline_parallel_module_fqns_per_model_part")
        )
        if not isinstance(lists, list) or not all(
            isinstance(x, list) and all(type(y) is str for y in x) for x in lists
        ):
            raise UsageError(f"expected a list of lists of modules, one for each stage, as {title} takes")
        stage_of: dict[str, int] = {}
        known = {rename(module) for name in names for module in modules_of(name)}
        older = {"output": "lm_head"} if "output" not in known else {}  # the head, as torchtitan called it before
        for stage, modules in enumerate(lists):
            for module in (older.get(x, x) for x in map(rename, modules)):
                if module.split(".")[-1] != ROTARY:
                    if module in stage_of:
                        raise UsageError(f"{module} is on stages {stage_of[module]} and {stage}; expected one stage")
                    stage_of[module] = stage
        homes, read = list[int](), set[str]()
        for name in names:
            modules = [x for x in map(rename, modules_of(name)) if x.split(".")[-1] != ROTARY]
            stages = {stage_of.get(x, -1) for x in modules} or {homes[-1] if homes else 0}
            read.update(modules)
            if len(stages) > 1 or -1 in stages:
                raise UsageError(
                    f"{name} is on no stage of the layout, or on several; every layer of the profile belongs to one"
                )
            homes += stages
        if further := [x for x in stage_of if x not in read]:
            raise UsageError(f"the layout has a module {further[0]}, which the profile has not; is it of this model?")
        for i, (home, following) in enumerate(pairwise(homes)):
            if following < home:
                raise UsageError(
                    f"{names[i + 1]} is on stage {following}, the layer before it on stage {home}; expected the model's order"
                )
        return tuple(sum(home <= stage for home in homes) for stage in range(len(lists)))

    return reader


# Numbers: DeepSpeed, torchgpipe, vLLM and SGLang


def _deepspeed(text: str, names: Sequence[str]) -> tuple[int, ...]:
    parts = _numbers(text, ("PARTS", "parts"))
    if not parts or parts[0] != 0 or parts[-1] != len(names):
        raise UsageError(
            f"the boundaries are {parts}; expected rising numbers from 0 to {len(names)}, as {_layers_text(names)}"
        )
    return tuple(parts[1:])


def _torchgpipe(text: str, names: Sequence[str]) -> tuple[int, ...]:
    counts = _numbers(text, ("balance",))
    if sum(counts) != len(names):
        raise UsageError(f"the counts add up to {sum(counts)}; {_layers_text(names)}")
    return tuple(accumulate(counts))


def _layers_text(names: Sequence[str]) -> str:
    return f"the model has {len(names)} layers as its author wrote them"


def _inference(text: str, names: Sequence[str]) -> tuple[int, ...]:
    found = re.search(r"_PP_LAYER_PARTITION[\"'\]]*\s*=\s*[\"']?(\d+(?:\s*,\s*\d+)*)", text)
    return _block_ends(_numbers(found[1] if found else text, ()), names, "the receiver")


def _block_ends(counts: Sequence[int], names: Sequence[str], title: str) -> tuple[int, ...]:
    """The ends of stages with so many blocks; the embeddings are on the first, the head on the last."""
    decoder = decoder_of(names, title)
    num_blocks = len(decoder.blocks)
    if sum(counts) != num_blocks:
        raise UsageError(f"the counts add up to {sum(counts)}; the profile has {num_blocks} blocks")
    ends = [decoder.blocks.start + x for x in accumulate(counts)]
    return (*ends[:-1], len(names))


def _pytorch(text: str, names: Sequence[str]) -> tuple[int, ...]:
    points = re.findall(r"[\"']([^\"']+)[\"']\s*:\s*SplitPoint\.BEGINNING", text)
    if not points and not re.fullmatch(r"(.*split_spec\s*[:=]\s*)?\{\s*\}.*", text.strip(), re.DOTALL):
        raise UsageError(
            f"{text.strip()[:40]!r} has no split points; expected such as {{'layers.4': SplitPoint.BEGINNING}}"
        )
    firsts = [modules_of(name)[0] for name in names]
    for point in points:
        if point not in firsts:
            raise UsageError(f"split point {point} is no layer of the profile; expected a module such as {firsts[-1]}")
    return (*(firsts.index(point) for point in points), len(names))


def _numbers(text: str, keys: Sequence[str]) -> list[int]:
    """A list of whole numbers, as a literal or with commas between them."""
    plain = text.strip().strip("\"'")
    if re.fullmatch(r"\d{1,9}(\s*,\s*\d{1,9})*", plain):
        return [int(x) for x in plain.split(",")]
    found = _literal(text, keys)
    if not isinstance(found, list | tuple) or not all(type(x) is int for x in found):
        raise UsageError(f"found {str(found)[:60]}; expected whole numbers, such as 16,16")
    return list(found)


def _literal(text: str, keys: Sequence[str]) -> object:
    """The literal that a text is, or that a Python module assigns to one of these names or passes by it."""
    try:
        tree = ast.parse(text.strip())
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        place = f"line {error.lineno} of the layout" if isinstance(error, SyntaxError) else "the layout"
        found = error.msg if isinstance(error, SyntaxError) else str(error) or "too deep"
        raise UsageError(f"{place} is no Python: {found}; expected a literal or a module") from error
    body = tree.body[0] if len(tree.body) == 1 else None
    values = [body.value] if isinstance(body, ast.Expr) and not isinstance(body.value, ast.Call) else []
    for node in () if values else ast.walk(tree):  # what is assigned to one of the names, or passed by it
        if isinstance(node, ast.keyword | ast.Assign):
            targets = [node.arg] if isinstance(node, ast.keyword) else [getattr(x, "id", None) for x in node.targets]
            values += [node.value] * any(x in keys for x in targets)
    for value in values:
        try:
            return ast.literal_eval(value)
        except (ValueError, TypeError, RecursionError, MemoryError):
            continue
    named = f", alone or named {' or '.join(keys)}" if keys else " such as 16,16"
    raise UsageError(f"{text.strip()[:40]!r} holds no layout; expected a literal{named}")


_READERS: dict[str, Callable[[str, Sequence[str]], tuple[int, ...]]] = {
    "megatron": _megatron,
    "verl": _megatron,
    "torchtitan": _module_lists("torchtitan", child_name),
    "automodel": _module_lists("automodel", str),
    "deepspeed": _deepspeed,
    "torchgpipe": _torchgpipe,
    "pytorch": _pytorch,
    "vllm": _inference,
    "sglang": _inference,
}
