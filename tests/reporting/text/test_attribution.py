"""The sentence on where the error of a step comes from."""

from __future__ import annotations

import pytest

from gplan.evaluate.attribution import Attribution, ErrorCause, ErrorPart
from gplan.reporting.text.run import attribution_text


def text_of(*parts: tuple[ErrorCause, int | None, float]) -> str:
    made = tuple(ErrorPart(cause=cause, stage=stage, seconds=seconds) for cause, stage, seconds in parts)
    return attribution_text(Attribution(predicted_s=1.0, measured_s=1.0 + sum(x.seconds for x in made), parts=made))


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (
            [(ErrorCause.COMPUTE, 1, -0.25), (ErrorCause.WAITING, None, 0.05), (ErrorCause.ENGINE, None, 0.001)],
            "the step took 199 ms less than predicted: compute of stage 1 -250 ms, waits caused by varying durations +50.0 ms",
        ),
        ([(ErrorCause.ENGINE, None, 0.001)], "the step took 1.00 ms more than predicted"),
        (
            [(ErrorCause.COMPUTE, 0, 0.1), (ErrorCause.ENGINE, None, 0.004), (ErrorCause.WAITING, None, 0.003)],
            "the step took 107 ms more than predicted: compute of stage 0 +100 ms, smaller parts together +7.00 ms",
        ),
    ],
)
def test_the_largest_parts_come_first_and_small_ones_are_left_out(
    parts: list[tuple[ErrorCause, int | None, float]], said: str
) -> None:
    assert text_of(*parts) == said
