"""Links of hosts that are alike, for replicas with one pipeline on each host; and links with all times multiplied."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations

from gplan.core import Machine, MachineDevice, Profile
from gplan.core.errors import UsageError
from gplan.core.machine import FREE_LINK
from gplan.core.units import counted

_MESSAGE_BYTES = 2**20  # by whose seconds links are compared


def on_alike_hosts(profile: Profile, machine: Machine, *, total_devices: int) -> tuple[Profile, int]:
    """The profile with the links of these hosts and the least memory of a device, and how many devices of one host are used.

    Of links that differ the slowest counts; sums of gradients that share a link are priced as if each had it alone. Raises
    UsageError for hosts that differ, and for devices that are more than there are, or fill one of several hosts in part.
    """
    counts, first = Counter(x.host for x in machine.devices), machine.devices[0]

    def traits(device: MachineDevice) -> str:
        return f"{counted(counts[device.host], 'device')} of speed {device.speed:g}"

    odd = next((x for x in machine.devices if x.speed != 1 or traits(x) != traits(first)), None)
    known = [x.memory_bytes for x in machine.devices if x.memory_bytes is not None]
    if odd is not None:
        raise UsageError(
            f"--devices plans replicas on hosts that are alike, with devices of speed 1; found {first.host}: {traits(first)}, "
            f"{odd.host}: {traits(odd)}; plan one pipeline over all of them: --k without --devices"
        )
    per_host = counts[first.host]
    if not 0 < total_devices <= len(machine.devices) or (total_devices > per_host and total_devices % per_host):
        raise UsageError(
            f"--devices {total_devices}: the machine has {counted(len(counts), 'host')} of {counted(per_host, 'device')}; expected "
            f"1 to {per_host}, or a multiple up to {len(machine.devices)}"
        )
    hosts = list({x.host: x for x in machine.devices[:total_devices]}.values())
    within = max((machine.link(x, x) for x in hosts), key=lambda x: x.transfer_s(_MESSAGE_BYTES))
    between = max(
        (machine.link(*x) for x in combinations(hosts, 2)), key=lambda x: x.transfer_s(_MESSAGE_BYTES), default=None
    )
    note = "every pipeline is on one host, and gradients of replicas cross the links between hosts"
    found = replace(
        profile,
        device=replace(profile.device, memory_bytes=min(known, default=None)),
        link=replace(within, replica_link=between or within),
        plan_notes=(*profile.plan_notes, *([note] if between else [])),
    )
    return found, min(per_host, total_devices)


def with_link_times(profile: Profile, factor: float) -> Profile:
    """The profile with every transfer's seconds multiplied by `factor`; 0 makes transfers free."""
    return replace(profile, link=profile.link.times(factor) if factor else FREE_LINK)
