"""What the engine takes beside the layers, found in a made-up step and in a real one."""

from __future__ import annotations

import pytest

from gplan.balancer import balance
from gplan.execute.engine_cost import engine_cost_of, measure_engine
from gplan.execute.relay import SENT_BYTES
from gplan.nouns import EngineCost, Link, Plan
from gplan.simulator import simulate
from tests.made import make_profile

ENGINE = EngineCost(action_s=0.25, sending=Link(latency_s=0.125, bytes_per_s=2.0**24))


def looped(sent_bytes: list[int], engine: EngineCost | None) -> Plan:
    profile = make_profile([2.0] * len(sent_bytes), output_bytes=sent_bytes, engine=engine)
    return balance(profile, num_stages=2, num_microbatches=4, schedule=f"looped-bfs:{len(sent_bytes) // 2}")


def test_what_the_engine_takes_is_found_again_in_the_step_that_it_gives() -> None:
    plan = looped([2**12, 2**20, 2**22, 2**12, 2**24, 0], ENGINE)
    found = engine_cost_of(plan, simulate(plan))
    assert found.action_s == pytest.approx(0.25)
    assert [found.sending.transfer_s(2**n) for n in (12, 22, 24)] == pytest.approx([0.125 + 2**-12, 0.375, 1.125])


def test_an_engine_that_takes_no_time_is_found_to_take_none() -> None:
    plan = looped([2**12, 2**20, 2**22, 0], None)
    found = engine_cost_of(plan, simulate(plan))
    assert (found.action_s, found.sending.transfer_s(2**30)) == pytest.approx((0.0, 0.0), abs=1e-6)


def test_two_processes_show_what_sending_takes_at_every_size() -> None:
    found = measure_engine(num_steps=5)
    assert found is not None and found.action_s > 0
    assert {point.num_bytes for point in found.sending.points} == set(SENT_BYTES)
    assert found.sending.transfer_s(SENT_BYTES[-1]) > found.sending.transfer_s(SENT_BYTES[0])
