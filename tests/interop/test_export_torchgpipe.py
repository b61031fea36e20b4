"""The call of torchgpipe's GPipe, checked by the restrictions that its guide gives."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gplan.core import Plan
from gplan.core.errors import UsageError
from gplan.interop.export.exporters import export
from tests.interop.planned import cut, cuts_of, planned, profiled, shared, value


class GPipe:
    """Of torchgpipe's: what it asks of its arguments, and how it divides the children."""

    def __init__(self, module: nn.Sequential, balance: list[int], *, chunks: int, checkpoint: str) -> None:
        assert isinstance(module, nn.Sequential)
        assert sum(balance) == len(module)
        assert all(x > 0 for x in balance)
        assert chunks > 0
        assert checkpoint in ("always", "except_last", "never")
        children = iter(module.named_children())
        self.partitions = [tuple(next(children)[0] for _ in range(size)) for size in balance]
        self.chunks, self.checkpoint = chunks, checkpoint


def run_export(plan: Plan) -> GPipe:
    """The exported Python run on an nn.Sequential of the plan's layers."""
    package = ModuleType("torchgpipe")
    package.GPipe = GPipe  # type: ignore[attr-defined]
    model = nn.Sequential()
    for name in plan.layer_names:
        model.add_module(name, nn.Identity())
    names: dict[str, Any] = {"model": model}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torchgpipe", package)
        exec(compile(export(plan, to="torchgpipe").text, "exported", "exec"), names)
    made = names["model"]
    assert isinstance(made, GPipe)
    return made


def gpipe_plan(*stages: list[str], **changed: Any) -> Plan:
    return planned(*stages, **{"schedule": "gpipe", **changed})


@given(st.data(), st.integers(2, 20))
def test_every_child_is_in_the_partition_that_the_plan_gives_it(data: st.DataObject, num_layers: int) -> None:
    plan = cut([str(i) for i in range(num_layers)], data.draw(cuts_of(num_layers)), schedule="gpipe")
    assert run_export(plan).partitions == [x.layer_names for x in plan.stages]


@pytest.mark.parametrize(
    ("recompute", "checkpoint"), [("never", "never"), ("always", "always"), ("except-last", "except_last")]
)
def test_all_three_ways_to_recompute_have_a_name(recompute: str, checkpoint: str) -> None:
    made = run_export(gpipe_plan(["a"], ["b"], recompute=recompute))
    assert (made.chunks, made.checkpoint) == (8, checkpoint)


REFUSALS = [
    (planned(["a"], ["b"]), "schedule 1f1b; torchgpipe can express gpipe"),
    (gpipe_plan(["a"], ["b"], recompute="selected"), "torchgpipe can express never or always or except-last"),
    (gpipe_plan(["a"], ["b"], num_replicas=2), "torchgpipe runs one pipeline; plan with --k 2 alone"),
    (gpipe_plan(["a"], ["b", "a#2"]), "layer a#2 is a second call of a module"),
    (gpipe_plan(["a"], ["b..c"]), "layer b..c is several modules that cannot be cut apart"),
    (gpipe_plan(["a"], ["b"], granularity="op"), "torchgpipe cuts between modules"),
]


@pytest.mark.parametrize(("plan", "told"), REFUSALS, ids=[told for _, told in REFUSALS])
def test_what_torchgpipe_cannot_run_is_refused(plan: Plan, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        export(plan, to="torchgpipe")
    assert told in str(caught.value)


def test_a_shared_parameter_is_refused_even_within_a_partition() -> None:
    profile = profiled("abc", shared_weights=(shared(0, 1),))
    with pytest.raises(
        UsageError, match=r"tied\.weight is used by several layers; torchgpipe refuses a parameter in two"
    ):
        export(gpipe_plan(["a", "b"], ["c"]), to="torchgpipe", profile=profile)


def test_skips_are_noted_with_what_to_do() -> None:
    profile = profiled("abc", values=(value(0, 1, 2), value(1, 2)))
    notes = export(gpipe_plan(["a"], ["b"], ["c"]), to="torchgpipe", profile=profile).notes
    assert any("what a makes skips layers" in x and "torchgpipe.skip" in x for x in notes)
