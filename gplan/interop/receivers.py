"""What other trainers can run: the rules of `receiver_table`, used by exports, by planning for a receiver, by layouts read back and by the docs.

A receiver restricts how a plan is run (schedule, recompute, micro-batches, replicas: `settings_problem`) and where a
model may be cut (`indivisible`: ranges of layers that stay on one stage). A plan for a receiver is searched under both;
an export of any plan is checked by both. Where weights and values are is known from the profile only; without it, those
rules are not checked. Sources of each receiver's rules are in its module of `interop/export`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from gplan.core import Constraints, Granularity, ModelId, Plan, Profile, Value
from gplan.core.errors import UsageError
from gplan.core.profile import modules_by_operation
from gplan.evaluate.replanning import setting_of
from gplan.graph.layer_graph import LayerGraph
from gplan.interop.author_layers import author_layers, authored_profile
from gplan.interop.receiver_table import RECEIVERS, SPECIAL_LAYERS, Receiver
from gplan.schedules.registry import make_schedule, schedule_info
from gplan.schedules.request import PipelineSetting
from gplan_profiler.analytic.decoder_profile import SPECIAL

MODEL_INPUT = "the model's input"


def receiver_named(name: str) -> Receiver:
    """The receiver of that name; raises UsageError for an unknown one."""
    if name not in RECEIVERS:
        raise UsageError(f"receiver {name!r} is not known; expected one of {', '.join(RECEIVERS)}")
    return RECEIVERS[name]


_OF_ONE_CHUNK = {"interleaved-1f1b:1": "1f1b", "looped-bfs:1": "gpipe"}


def plain_schedule(schedule: str) -> str:
    """The common name of a schedule; with one chunk per device that of the schedule without chunks."""
    title = schedule_info(schedule).title
    return _OF_ONE_CHUNK.get(title, title)


def settings_problem(name: str, settings: PipelineSetting) -> str:
    """Why a receiver cannot run a pipeline so, with what to do, as the rest of a sentence on the plan; "" if it can."""
    return next(_settings_problems(receiver_named(name), name, settings), "")


def _settings_problems(receiver: Receiver, name: str, settings: PipelineSetting) -> Iterator[str]:
    title, num_devices, num_stages = receiver.title, settings.num_devices, settings.num_stages
    schedule = plain_schedule(settings.schedule)
    if settings.num_replicas > 1 and not receiver.replicas:
        yield (f"runs {settings.num_replicas} replicas; {title} runs one pipeline; plan with --k {num_devices} alone")
    if settings.sharding != "none":
        yield f"shards the {settings.sharding} over replicas, which is not exported to {title}; plan again with --shard none"
    stages = f"{num_stages} stages on {num_devices} devices ({schedule})"
    choice = f"plan again with --schedule {' or '.join(receiver.schedules or ('1f1b', 'gpipe'))}"
    if receiver.max_chunks == 1 and num_stages > num_devices:
        yield f"has {stages}; {title} holds one stage per device; {choice}"
    if receiver.schedules is not None and plain_schedule(settings.schedule).partition(":")[0] not in receiver.schedules:
        yield f"has schedule {schedule}; {title} can express {' or '.join(receiver.schedules)}; {choice}"
    if receiver.recompute and settings.recompute not in receiver.recompute:
        modes = " or ".join(receiver.recompute)
        yield f"has recompute {settings.recompute}; {title} can express {modes}; plan again with --recompute {modes}"
    if settings.recompute != "never" and schedule_info(settings.schedule).splits_backward:
        yield (
            f"recomputes and {schedule} splits the backward; {title} would recompute several times per micro-batch, the plan "
            "once; plan again with --recompute never, or with another --schedule"
        )
    yield from _ORDER_PROBLEMS.get(name, lambda _: ())(settings)


def _megatron_order(settings: PipelineSetting) -> Iterator[str]:
    """1F1B, or interleaved 1F1B with M a multiple of K."""
    num_devices, num_microbatches = settings.num_devices, settings.num_microbatches
    if settings.num_stages == num_devices:
        return
    if num_devices == 1:
        yield f"has {settings.num_stages} stages on one device; Megatron-LM interleaves on 2 devices or more; plan again with --schedule 1f1b"
    if num_microbatches % num_devices:
        yield (
            f"interleaves {num_microbatches} micro-batches on {num_devices} devices; Megatron-LM does so in groups of "
            f"{num_devices}; plan again with another --microbatches, or with --schedule 1f1b"
        )


def _places(settings: PipelineSetting) -> tuple[int, ...]:
    counts = {"num_devices": settings.num_devices, "num_microbatches": settings.num_microbatches}
    return make_schedule(settings.schedule, **counts).devices


def _titan_order(settings: PipelineSetting) -> Iterator[str]:
    """As many stages on each rank, stage s on rank s mod K, or two on each there and back."""
    num_devices, places = settings.num_devices, _places(settings)
    loop = tuple(stage % num_devices for stage in range(settings.num_stages))
    there_and_back = (*range(num_devices), *reversed(range(num_devices)))
    if places not in (loop, there_and_back) or settings.num_stages % num_devices:
        yield (
            f"has stages on devices {', '.join(map(str, places))} ({plain_schedule(settings.schedule)}); expected as many on "
            "each, stage s on rank s mod K, or two on each there and back; plan again with another --schedule"
        )


def _torch_order(settings: PipelineSetting) -> Iterator[str]:
    """No consecutive stages on one device."""
    for stage, (device, following) in enumerate(pairwise(_places(settings))):
        if device == following:
            yield (
                f"cannot be sent on: stages {stage} and {stage + 1} are neighbours on device {device} "
                f"({plain_schedule(settings.schedule)}), and the stages that torch's pipeline() makes cannot send to a stage of the same "
                "rank; plan again with another --schedule"
            )


_ORDER_PROBLEMS: dict[str, Callable[[PipelineSetting], Iterator[str]]] = {
    "megatron": _megatron_order,
    "verl": _megatron_order,
    "torchtitan": _titan_order,
    "automodel": _titan_order,
    "pytorch": _torch_order,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayers:
    """Where the layers of a language model are: embeddings, one list of blocks, multi-token prediction, head."""

    blocks: range
    prediction: range  # empty if the model has none
    num_layers: int

    @property
    def embeddings(self) -> range:
        """The layers before the blocks."""
        return range(self.blocks.start)

    @property
    def head(self) -> range:
        """The layers after all blocks."""
        return range(self.prediction.stop, self.num_layers)

    def counts(self, first: int, end: int) -> tuple[int, int]:
        """The blocks and the multi-token prediction layers among layers first to end - 1."""
        found = (len(range(max(first, x.start), min(end, x.stop))) for x in (self.blocks, self.prediction))
        return next(found), next(found)


_ENTRY = re.compile(r"(.+)\.(\d+)")  # of a list of modules
_PREDICTION = re.compile(r"(?:.*\.)?mtp(?:_\w+)?(?:\..*)?|.*\.mtp_?\d*")  # mtp.0, model.mtp_layers.1


def decoder_of(names: Sequence[str], title: str, profile: Profile | None = None) -> DecoderLayers:
    """The parts of a language model by the names of its layers; raises UsageError for other models.

    By the kinds of a profile, a sequence of different modules beside one list of blocks belongs to embeddings or head.
    """
    found = [i for i, name in enumerate(names) if _PREDICTION.fullmatch(name)]
    matches = {i: match for i, name in enumerate(names) if i not in found and (match := _ENTRY.fullmatch(name))}
    lists = {match[1]: [i for i, x in matches.items() if x[1] == match[1]] for match in matches.values()}
    kinds = {} if profile is None else {x.name: x.kind for x in profile.layers}
    alike = [x for x, places in lists.items() if len(places) > 1 and len({kinds.get(names[i]) for i in places}) == 1]
    if profile is not None and len(alike) == 1:
        lists = {alike[0]: lists[alike[0]]}
    if len(lists) != 1:
        blocks_text = f"blocks in {len(lists)} lists ({', '.join(lists)})" if lists else "no blocks such as layers.0"
        raise _not_a_decoder(f"the model has {blocks_text}", title)
    (entries,) = lists.values()
    blocks = range(entries[0], entries[-1] + 1)
    if [int(matches[i][2]) for i in entries] != list(range(len(blocks))):
        raise _not_a_decoder(f"other layers stand between the blocks {names[blocks[0]]} and {names[blocks[-1]]}", title)
    prediction = range(found[0], found[-1] + 1) if found else range(blocks.stop, blocks.stop)
    if len(prediction) != len(found) or prediction.start != blocks.stop:
        raise _not_a_decoder(f"{names[found[0]]} does not follow the blocks at once", title)
    decoder = DecoderLayers(blocks=blocks, prediction=prediction, num_layers=len(names))
    if not decoder.embeddings or not decoder.head:
        raise _not_a_decoder(f"no layer stands {'after' if decoder.embeddings else 'before'} the blocks", title)
    return decoder


def _not_a_decoder(found: str, title: str) -> UsageError:
    return UsageError(f"{found}; {title} takes embeddings, then one list of blocks, then a head; use another format")


def modules_of(layer: str) -> tuple[str, ...]:
    """The modules of a layer: several if they could not be separated; "#2" marks a second call.

    >>> modules_of("blocks.3"), modules_of("relu#2"), modules_of("stem..blocks.0")
    (('blocks.3',), ('relu',), ('stem', 'blocks.0'))
    """
    return tuple(name.partition("#")[0] for name in layer.split(".."))


@dataclass(frozen=True, slots=True, kw_only=True)
class Indivisible:
    """Layers first to last that a receiver cannot cut apart, and why, as the end of "the plan cuts before X, "."""

    first: int
    last: int
    why: str


def indivisible(name: str, names: Sequence[str], profile: Profile | None) -> tuple[Indivisible, ...]:
    """What a receiver cannot cut apart in a model of these layers; raises UsageError for a model that it cannot take."""
    return tuple(x for x in _indivisible(receiver_named(name), names, profile) if x.first < x.last)


def _indivisible(receiver: Receiver, names: Sequence[str], profile: Profile | None) -> Iterator[Indivisible]:
    title, special = receiver.title, special_layers(profile)
    if (found := receiver.refuses & special) and found not in receiver.combinations:
        raise UsageError(
            f"the model has {special_text(found)}, which the models of {title} do not have; choose another trainer"
        )
    decoder = decoder_of(names, title, profile) if receiver.cuts in ("names", "decoder", "blocks") else None
    if decoder is not None and receiver.cuts != "names":
        _check_blocks(decoder, profile, title)
        near, first, last = int(receiver.cuts == "blocks"), decoder.blocks.start, decoder.prediction.stop
        yield Indivisible(first=0, last=first - 1 + near, why=f"within the embeddings; {title} cannot cut them")
        yield Indivisible(first=last - near, last=len(names) - 1, why=f"within the head; {title} cannot cut it")
        if decoder.prediction and "Mamba" in special and receiver.cuts == "decoder":
            raise UsageError(
                f"the model has Mamba-2 layers and multi-token prediction, of which gplan writes no pattern for {title}; leave the latter "
                "out with gplan layout --set num_nextn_predict_layers=0"
            )
        if decoder.prediction:
            first, last = decoder.prediction.start - near, decoder.prediction.stop - 1
            yield Indivisible(
                first=first, last=last, why=f"within multi-token prediction; {title} holds its layers on one stage"
            )
        return  # every stage makes masks and positions itself, and sums the gradients of tied embeddings
    is_built = profile is None or not profile.is_for_megatron  # else a sequence for its sizes can still be written
    if not is_built and receiver.cuts != "items" and (further := [x for x in names if _PREDICTION.fullmatch(x)]):
        raise UsageError(
            f"{further[0]} is multi-token prediction, which models for {title} do not have; leave it out with gplan layout --set "
            "num_nextn_predict_layers=0"
        )
    if receiver.cuts != "items" or is_built:
        _check_names(receiver, names)
    if receiver.tied == "one stage":
        yield from _tied(profile, title)
    if receiver.cuts == "calls":
        yield from _beginnings(names)
        yield from _inputs(names, profile, title)
    if receiver.cuts in ("children", "names"):
        yield from _calls(names, title)
        yield from _skipping(receiver, names, profile)


def special_layers(profile: Profile | None) -> set[str]:
    """Which of SPECIAL_LAYERS a computed profile has."""
    if profile is None or not profile.sums_in_place:
        return set()
    return {x for x in dict(profile.model.settings).get(SPECIAL, "").split(",") if x}


def special_text(found: Collection[str]) -> str:
    """Some of SPECIAL_LAYERS in words."""
    *first, last = (text for name, text in SPECIAL_LAYERS.items() if name in found)
    return f"{', '.join(first)} and {last}" if first else last


def _check_names(receiver: Receiver, names: Sequence[str]) -> None:
    """Raise UsageError for layers that are no items of a sequence, or no children of the model or entries of one."""
    for layer in names:
        if receiver.cuts == "items" and modules_of(layer) != (layer,):
            found = "several modules that cannot be cut apart" if ".." in layer else "a second call of a module"
            raise UsageError(
                f"layer {layer} is {found}; {receiver.title} takes a sequence of modules; write the model as an nn.Sequential, "
                "profile that and plan again"
            )
        for module in map(child_name, modules_of(layer)) if receiver.cuts == "children" else ():
            if module.isdigit():
                raise UsageError(
                    f"layer {module} is a child of an nn.Sequential; torchtitan takes modules away and leaves None, which a "
                    "Sequential cannot pass over; give gplan a module whose forward can"
                )
            if module.count(".") > 1:
                raise UsageError(
                    f"{module} is too deep in the model; torchtitan splits a model at its children, such as norm, and at the "
                    "entries of a child that is a list, such as layers.3; move the layers up to the model"
                )
        if receiver.cuts == "names" and (match := _ENTRY.fullmatch(layer)) and match[1].split(".")[-1] != "layers":
            raise UsageError(
                f"{layer} is an entry of a list; {receiver.title} takes Hugging Face models whose blocks are in a list named layers, "
                "such as model.layers.3, and no other list; use another format"
            )


def child_name(module: str) -> str:
    """The name of a module of a Hugging Face model in torchtitan's transformers backend; others as they are.

    >>> child_name("model.layers.3"), child_name("model.embed_tokens"), child_name("norm")
    ('layers.3', 'tok_embeddings', 'norm')
    """
    return {"embed_tokens": "tok_embeddings"}.get(short := module.removeprefix("model."), short)


_PASSED_ON = "let each layer between return a copy of it too (y.clone()), or train with gplan run, which sends it to every stage that reads it"


def _check_blocks(decoder: DecoderLayers, profile: Profile | None, title: str) -> None:
    """Raise UsageError unless what trains goes to the next block or layer only, and no two blocks share a weight."""
    if profile is None:
        return
    names = [layer.name for layer in profile.layers]
    for value in profile.values:
        maker = value.producer
        if maker is None or maker >= decoder.blocks.stop or is_remade(names, value):
            continue
        next_layer = max(maker + 1, decoder.blocks.start)
        later = [x for x in value.consumers if x > next_layer and (maker in decoder.blocks or x in decoder.blocks)]
        if later:
            where = f"by {names[later[-1]]}" if later[-1] < len(names) else "as an output of the model"
            raise UsageError(
                f"the output of {names[maker]} is read beyond {names[next_layer]}, {where}; {title} gives a block nothing but the "
                f"output of the block before it: {_PASSED_ON}"
            )
    for shared in profile.tied_weights:
        if any(layer in decoder.blocks for layer in shared.layers):
            raise _not_a_decoder(f"{shared.name} is shared by blocks", title)


def _tied(profile: Profile | None, title: str) -> Iterator[Indivisible]:
    for shared in () if profile is None else profile.tied_weights:
        why = f"and {shared.name} is used on several stages; {title} does not sum its gradients: untie it, or use it on one stage"
        yield Indivisible(first=shared.layers[0], last=shared.layers[-1], why=why)


def _beginnings(names: Sequence[str]) -> Iterator[Indivisible]:
    """No stage begins with a module that is called several times: a split point splits at every call."""
    calls = Counter(module for layer in names for module in modules_of(layer))
    for i, layer in enumerate(names[1:], 1):
        module = modules_of(layer)[0]
        if calls[module] > 1:
            why = f"a stage that begins with a call of {module}, which is called {calls[module]} times; a split point splits at every call"
            yield Indivisible(first=i - 1, last=i, why=why)


def _inputs(names: Sequence[str], profile: Profile | None, title: str) -> Iterator[Indivisible]:
    """The model's inputs are read on the first stage only: torch gives them to no other."""
    for value in () if profile is None else profile.values:
        if value.producer is None:
            last = min(value.consumers[-1], len(names) - 1)
            why = f"and {MODEL_INPUT} is read up to {names[last]}; {title} gives the inputs to the first stage only"
            yield Indivisible(first=0, last=last, why=why)


def _calls(names: Sequence[str], title: str) -> Iterator[Indivisible]:
    """A module that is called several times is on one stage."""
    first: dict[str, int] = {}
    for i, layer in enumerate(names):
        for module in modules_of(layer):
            if first.setdefault(module, i) != i:
                why = f"and {module} is called on several stages; {title} puts a module on one stage: use a module for each call"
                yield Indivisible(first=first[module], last=i, why=why)


def _skipping(receiver: Receiver, names: Sequence[str], profile: Profile | None) -> Iterator[Indivisible]:
    """From after the maker of a value to its last reader, unless each stage makes it again."""
    for value in () if profile is None else profile.values:
        maker, last = -1 if value.producer is None else value.producer, min(value.consumers[-1], len(names) - 1)
        if is_remade(names, value):
            continue
        made_by = MODEL_INPUT if maker < 0 else f"the output of {names[maker]}"
        why = f"and {made_by} skips layers there; a stage of {receiver.title} gets only what the layer before it returns: {_PASSED_ON}"
        yield Indivisible(first=maker + 1, last=last, why=why)


def is_remade(names: Sequence[str], value: Value) -> bool:
    """Whether every stage of a language model makes a value itself: masks and positions, which come from the embeddings
    and have no gradient."""
    entries = (i for i, name in enumerate(names) if _ENTRY.fullmatch(name))
    is_early = value.producer is not None and value.producer < next(entries, 0)
    return is_early and not any(cost.gradient_bytes for cost in value.costs)


def constraints_for(name: str, profile: Profile) -> Constraints:
    """What a receiver asks of the partition of a profile; raises UsageError for a model that it cannot take."""
    check_granularity(name, profile.model, profile.granularity, profile.layers[0].name)
    whole, names = authored_profile(profile), [layer.name for layer in profile.layers]
    parts = [layers for _, layers in author_layers(names, profile.model.divided)]
    check_weights(name, whole)
    ranges = [(x.first, x.last) for x in indivisible(name, [layer.name for layer in whole.layers], whole)]
    ranges += [(i, i) for i, layers in enumerate(parts) if len(layers) > 1]  # no layer is cut apart
    kept = dict.fromkeys((parts[first].start, parts[last].stop - 1) for first, last in ranges)
    inner = {x for x in kept if any(x != y and y[0] <= x[0] and x[1] <= y[1] for y in kept)}
    return Constraints(
        keep_together=tuple((names[first], names[last]) for first, last in kept if (first, last) not in inner),
        profile_order=not LayerGraph(len(names), profile.precedence).is_chain,
    )


def check_granularity(name: str, model: ModelId, granularity: Granularity, layer: str) -> None:
    """Raise UsageError for layers that are single operations."""
    title, again = receiver_named(name).title, "profile with --granularity layer and plan again"
    if granularity == "op":
        raise UsageError(f"the plan cuts between operations, such as {layer}; {title} cuts between modules; {again}")
    if single := modules_by_operation(model.divided):
        where = single[0] or "the model itself"
        raise UsageError(f"the plan cuts between operations of {where}; {title} cuts between modules; {again}")


def check_weights(name: str, profile: Profile | None) -> None:
    """Raise UsageError for tied weights where the receiver takes none."""
    receiver = receiver_named(name)
    if receiver.tied == "refused" and profile is not None and profile.tied_weights:
        raise UsageError(
            f"{profile.tied_weights[0].name} is used by several layers; {receiver.title} refuses a parameter in two children; "
            "untie it, or use another format"
        )


def most_stages(names: Sequence[str], kept: Sequence[Indivisible]) -> tuple[int, str]:
    """The most stages that a model of these layers can be cut into, and why not more; "" where every cut is possible."""
    most = len(names) - len({i for x in kept for i in range(x.first, x.last)})
    if not kept:
        return most, ""
    longest = max(kept, key=lambda x: x.last - x.first)
    return most, f"{names[longest.first]} to {names[longest.last]} would be cut apart, {longest.why}"


def check_plan(name: str, plan: Plan, profile: Profile | None) -> None:
    """Raise UsageError for a plan that a receiver cannot run, with the reason and what to do."""
    title = receiver_named(name).title
    check_order(plan, profile, title)
    names = plan.layer_names
    kept = indivisible(name, names, profile)
    check_weights(name, profile)
    if problem := settings_problem(name, setting_of(plan)):
        raise UsageError(f"the plan {problem}")
    most, why = most_stages(names, kept)
    if plan.num_stages > most:
        raise UsageError(f"the plan has {plan.num_stages} stages, of this model {title} can run at most {most}: {why}")
    for cut in plan.cuts:
        for x in kept:
            if x.first < cut <= x.last:
                raise UsageError(
                    f"the plan cuts before {names[cut]}, {x.why}; plan again with --for {name}, which keeps "
                    f"{names[x.first]}..{names[x.last]} on one stage"
                )


def check_order(plan: Plan, profile: Profile | None, title: str) -> None:
    """Raise UsageError unless the stages follow the profile's order, in which the model runs its layers."""
    names = tuple(layer.name for layer in profile.layers) if profile is not None else plan.layer_names
    strange = sorted(set(names) ^ set(plan.layer_names))
    if strange:
        owner = "the plan" if strange[0] in plan.layer_names else "the profile"
        raise UsageError(
            f"only {owner} has a layer {strange[0]}; expected the profile that the plan was made from; give it with --profile"
        )
    for found, expected in zip(plan.layer_names, names, strict=True):
        if found != expected:
            raise UsageError(
                f"the plan puts {found} where the model runs {expected}; {title} runs the layers in the model's own order; "
                "export to json, or keep the branches together with --keep-together and plan again"
            )
