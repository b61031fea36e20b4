"""State dicts: the plain model's keys and values, saved and loaded in parts and whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gplan
from gplan.core.errors import FileError, UsageError
from gplan.runtime.pipeline import Pipeline
from tests.runtime.semantics.checks import NUM_DEVICES, assert_same, both_engines, built, plan_of
from tests.runtime.semantics.models import Buffered, Subject, Tied, normed_row, row, subject, token_subject

ROW, NORMED, BUFFERED, TIED = subject(row), subject(normed_row), subject(Buffered), token_subject(Tied)


def opened(case: Subject, num_devices: int, **options: Any) -> Pipeline:
    return gplan.pipeline(case.build, plan_of(case, num_devices, **options), loss=case.loss)


@pytest.mark.parametrize(
    ("case", "num_devices"),
    [*((NORMED, k) for k in NUM_DEVICES), (BUFFERED, 3), (TIED, 4)],
    ids=[*(f"norms-{k}" for k in NUM_DEVICES), "buffers-3", "tied-4"],
)
def test_state_dict_keys_and_values(case: Subject, num_devices: int) -> None:
    model = built(case)
    expected = model.state_dict()

    def script() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        pipe = opened(case, num_devices)
        return pipe.state_dict(), pipe.full_state_dict()

    for parts in both_engines(num_devices, script).values():
        assert list(parts[0][1]) == list(expected)
        assert all(torch.equal(x, expected[key]) for own, whole in parts for key, x in {**own, **whole}.items())
        assert set().union(*(own for own, _ in parts)) == set(expected)
        assert all(not whole for _, whole in parts[1:])
        if case is not TIED:  # of which a key may be on two ranks
            assert sum(len(own) for own, _ in parts) == len(expected) or case is BUFFERED
        case.build().load_state_dict(parts[0][1], strict=True)


@pytest.mark.parametrize(
    ("case", "num_devices"), [(NORMED, 4), (BUFFERED, 2), (TIED, 3)], ids=["norms-4", "buffers-2", "tied-3"]
)
def test_state_dict_round_trip(case: Subject, num_devices: int) -> None:
    torch.manual_seed(77)
    model = case.build()
    inputs, _ = case.batch(8)
    model(inputs)  # so that norms have seen something
    expected = {key: x.clone() for key, x in model.state_dict().items()}
    output = model.eval()(inputs).detach()

    def script() -> tuple[dict[str, Tensor], Tensor | None]:
        pipe = opened(case, num_devices)
        pipe.load_state_dict(expected)
        found = pipe.full_state_dict(), pipe.predict(inputs)
        pipe.load_state_dict(pipe.state_dict())  # a rank's own part
        return found

    for parts in both_engines(num_devices, script).values():
        assert_same(parts[0][0], expected, tolerance=0.0)
        assert parts[-1][1] is not None
        torch.testing.assert_close(parts[-1][1], output)


def test_trained_state_continues_in_plain_model() -> None:
    def script() -> tuple[dict[str, Tensor], float]:
        pipe = opened(BUFFERED, 2)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        pipe.step(*BUFFERED.batch(8))
        optimizer.step()
        return pipe.full_state_dict(), pipe.eval_step(*BUFFERED.batch(8)).item()

    for parts in both_engines(2, script).values():
        model = BUFFERED.build()
        model.load_state_dict(parts[0][0])
        inputs, targets = BUFFERED.batch(8)
        assert parts[0][1] == pytest.approx(BUFFERED.loss(model(inputs), targets).item(), rel=1e-5)


def test_full_state_dict_is_a_copy() -> None:
    def script() -> bool:
        pipe = opened(ROW, 2)
        state = pipe.full_state_dict()
        before = {key: x.clone() for key, x in state.items()}
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
        pipe.step(*ROW.batch(8))
        optimizer.step()
        return all(torch.equal(x, state[key]) for key, x in before.items())

    assert both_engines(2, script) == {"virtual": [True], "torch": [True, True]}


def test_unsaved_buffer_on_one_stage() -> None:
    def script() -> int:
        pipe = opened(BUFFERED, 2)
        assert "shift" not in pipe.state_dict()
        resident = [x for stage in pipe.runner.stages for x in pipe.runner.resident_tensors(stage)]
        return sum(torch.equal(x, torch.arange(6.0)) for x in resident)

    for parts in both_engines(2, script).values():
        assert sum(parts) == 1


@pytest.mark.parametrize(
    ("spoil", "kind", "text"),
    [
        (
            lambda state: {},
            FileError,
            r"lacks 10 keys \(0.mix.bias, 0.mix.weight, 1.mix.bias and 7 more\); expected those of the",
        ),
        (lambda state: {**state, "extra": torch.ones(1)}, FileError, r"holds unknown 1 key \(extra\)"),
        (lambda state: {**state, "0.mix.bias": torch.ones(2)}, FileError, r"another shape for 1 key \(0.mix.bias\)"),
        (lambda state: {**state, "0.mix.bias": [1.0] * 6}, FileError, "holds a list as 0.mix.bias; expected tensors"),
        (lambda state: list(state), UsageError, "the state is a list; expected a state dict"),
        (lambda state: None, UsageError, "the state is a NoneType; expected a state dict"),
    ],
)
def test_misfit_state_dict_refused(spoil: Callable[[Any], Any], kind: type[Exception], text: str) -> None:
    pipe = opened(ROW, 2)
    before = pipe.full_state_dict()
    other = {key: x + 1.0 for key, x in before.items()}
    with pytest.raises(kind, match=text):
        pipe.load_state_dict(spoil(other))
    assert_same(pipe.state_dict(), before, tolerance=0.0)


def test_bfloat16_model_keeps_dtype() -> None:
    case = Subject(
        build=lambda: row().bfloat16(),
        inputs=lambda generator, n: ROW.inputs(generator, n).bfloat16(),
        targets=lambda generator, n: ROW.targets(generator, n).bfloat16(),
        loss=nn.functional.mse_loss,
    )

    def script() -> tuple[set[torch.dtype], bool]:
        pipe = opened(case, 2)
        loss = pipe.step(*case.batch(8))
        return {x.dtype for x in pipe.state_dict().values()}, bool(loss.isfinite())

    for parts in both_engines(2, script).values():
        assert parts == [({torch.bfloat16}, True)] * len(parts)
