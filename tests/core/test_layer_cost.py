"""Costs that cannot be are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gplan.core import StepCost


@pytest.mark.parametrize("field", ["slow_down", "update_slow_down"])
@pytest.mark.parametrize("factor", [0.9, float("inf"), float("nan")])
def test_no_update_is_faster_beside_other_work(field: str, factor: float) -> None:
    with pytest.raises(ValueError, match=f"{field} is {factor}; expected a finite factor of 1 or more"):
        replace(StepCost.none(), **{field: factor})
