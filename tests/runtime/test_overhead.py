"""The engine's own cost, from simulated steps and from a real run."""

from __future__ import annotations

import pytest

from gplan.core import EngineCost, Link, Plan
from gplan.runtime.overhead import SENT_BYTES, engine_cost_from_steps, measure_engine
from gplan.simulation.simulator import simulate
from gplan.strategy_search.planner import balance
from tests.made import make_profile
from tests.runtime.forked import forking

ENGINE = EngineCost(action_s=2e-4, sending=Link(latency_s=1e-5, bytes_per_s=1e9), step_s=3e-3)


def looped(engine: EngineCost | None, link: Link) -> Plan:
    sizes = [size for sent in SENT_BYTES for size in (sent, SENT_BYTES[0])]
    profile = make_profile([1e-3] * len(sizes), output_bytes=[*sizes[:-1], 0], engine=engine, link=link)
    return balance(profile, num_devices=2, num_microbatches=4, schedule=f"looped-bfs:{len(sizes) // 2}")


@pytest.mark.parametrize("bytes_per_s", [1e30, 8e9, 1e9])
def test_overhead_recovered_from_simulated_steps(bytes_per_s: float) -> None:
    plan = looped(ENGINE, Link(latency_s=1e-5, bytes_per_s=bytes_per_s))
    found = engine_cost_from_steps(plan, [simulate(plan)])
    assert (found.action_s, found.step_s) == pytest.approx((2e-4, 3e-3))
    assert [found.sending.transfer_s(size) for size in SENT_BYTES] == pytest.approx(
        [1e-5 + size / 1e9 for size in SENT_BYTES]
    )


def test_zero_overhead_recovered() -> None:
    plan = looped(None, Link(latency_s=1e-5, bytes_per_s=1e10))
    found = engine_cost_from_steps(plan, [simulate(plan)])
    assert (found.action_s, found.sending.transfer_s(2**30), found.step_s) == pytest.approx((0.0, 0.0, 0.0), abs=1e-6)


def test_measured_cost_has_every_size() -> None:
    with forking():
        found = measure_engine()  # with fewer steps a busy host can leave a size without a gap
    assert found.action_s > 0
    assert {point.num_bytes for point in found.sending.points} == set(SENT_BYTES)
