"""Corrections: functions from Profile to Profile that are applied before anything is planned.

The planner, and all after it, see one plain profile: seconds that hold on these devices and bytes that hold for one of
them, at one micro-batch size. Nothing later multiplies a factor in or divides one out.

    sharding          one of several replicas that divide their stages
    microbatch_size   one micro-batch size, profiled or between two profiled ones
    contention        devices that are cores of one host, and compute at the same time

`planned` applies them in this order: what replicas gather, and costs between two sizes, are slowed beside other devices
too. What a user gives comes before: `gradient_reduction` when a profile is computed, `links` where replicas are on the hosts
of a machine. `host_speed` is applied to compare a run: the speed that the host had in it; `host_clock` to show what the
host of a GPU costs.
"""

from __future__ import annotations

from gplan.core import Profile, Sharding
from gplan.corrections.contention import beside_each_other, without_contention
from gplan.corrections.microbatch_size import at_microbatch_size
from gplan.corrections.sharding import sharded


def planned(
    profile: Profile,
    *,
    microbatch_size: int | None = None,
    num_devices: int = 1,
    num_replicas: int = 1,
    sharding: Sharding = "none",
) -> Profile:
    """The profile that a pipeline of `num_devices` devices is planned with; its replicas' hosts are their own.

    The micro-batch size is by default the largest profiled one. Raises UsageError for one outside the profiled ones.
    """
    size = profile.microbatch_sizes[-1] if microbatch_size is None else microbatch_size
    replica = sharded(profile, num_replicas=num_replicas, sharding=sharding)
    return beside_each_other(at_microbatch_size(replica, size), num_devices=num_devices)


def as_run_by(profile: Profile, engine: str) -> Profile:
    """The profile with the times that an engine's devices take: the virtual engine is one process that computes alone."""
    return without_contention(profile) if engine == "virtual" else profile
