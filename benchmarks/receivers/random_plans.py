"""Random plans that a receiver can run: layers by its names, any allowed cuts, schedules, chunks and recompute modes."""

from __future__ import annotations

import random
from collections.abc import Iterator

from gplan.core import RECOMPUTE_MODES, Plan
from gplan.interop.receiver_table import RECEIVERS
from gplan.interop.receivers import indivisible, settings_problem
from gplan.schedules.request import PipelineSetting
from tests.interop.planned import cut

_SCHEDULES = ("gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-v")
_MOST_BLOCKS, _MOST_DEVICES, _MOST_CHUNKS = 60, 8, 4
_FEWER_BLOCKS, _FEWER_DEVICES = 16, 4
_COPYING = ("torchtitan", "automodel")  # they copy the whole model for every stage


def random_plans(receiver: str, count: int, *, seed: int = 0) -> Iterator[Plan]:
    """So many plans, different ones for each seed."""
    random_source = random.Random(f"{receiver} {seed}")
    while count:
        plan = _random_plan(receiver, random_source)
        if plan is not None:
            count -= 1
            yield plan


def layer_names(num_blocks: int, *, is_hugging_face: bool = False, num_predictions: int = 0) -> tuple[str, ...]:
    """The layers of a language model as torchtitan's models have them, or those of Hugging Face."""
    before, path = ("model.", "model.layers") if is_hugging_face else ("", "layers")
    first = f"{before}embed_tokens" if before else "tok_embeddings"
    blocks = [f"{path}.{i}" for i in range(num_blocks)]
    return (first, *blocks, *(f"mtp.{i}" for i in range(num_predictions)), f"{before}norm", "lm_head")


def _random_plan(receiver: str, random_source: random.Random) -> Plan | None:
    """One plan, None where the draw is not one that the receiver can run."""
    rules, draw = RECEIVERS[receiver], random_source
    schedule = draw.choice([x for x in _SCHEDULES if rules.schedules is None or x in rules.schedules])
    if schedule in ("interleaved-1f1b", "looped-bfs"):
        schedule += f":{draw.randint(1, _MOST_CHUNKS)}"
    is_copied = receiver in _COPYING
    num_devices = draw.randint(1, _FEWER_DEVICES if is_copied else _MOST_DEVICES)
    settings = PipelineSetting(
        schedule=schedule,
        num_devices=num_devices,
        num_microbatches=draw.choice([num_devices, 2 * num_devices, draw.randint(1, 3 * num_devices)]),
        recompute=draw.choice([*(rules.recompute or RECOMPUTE_MODES)]),
    )
    has_prediction = rules.cuts == "decoder" and draw.random() < 0.3
    is_hugging_face = receiver == "automodel" or (receiver == "torchtitan" and draw.random() < 0.5)
    num_blocks = draw.randint(1, _FEWER_BLOCKS if is_copied else _MOST_BLOCKS)
    names = layer_names(num_blocks, is_hugging_face=is_hugging_face, num_predictions=int(has_prediction))
    kept = indivisible(receiver, names, None)
    free = [x for x in range(1, len(names)) if not any(y.first < x <= y.last for y in kept)]
    num_cuts = settings.num_stages - 1
    if num_cuts > len(free) or settings_problem(receiver, settings) or (settings.recompute == "selected"):
        return None
    plan = plan_of(names, sorted(draw.sample(free, num_cuts)), settings)
    return None if has_prediction and not _takes_prediction(plan) else plan


def _takes_prediction(plan: Plan) -> bool:
    """Whether multi-token prediction is on the last stage of a rank other than the first."""
    stage = next(x for x in plan.stages if any(name.startswith("mtp.") for name in x.layer_names))
    return stage.on_device > 0 and plan.num_stages - stage.index <= plan.num_devices


def plan_of(names: tuple[str, ...], cuts: list[int], settings: PipelineSetting) -> Plan:
    """A plan of these layers cut at these places, with costs of no interest."""
    kept = {x: getattr(settings, x) for x in ("schedule", "num_microbatches", "recompute")}
    plan = cut(names, cuts, **kept)
    assert plan.num_devices == settings.num_devices
    return plan
