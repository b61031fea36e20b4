"""Measures a cluster under torchrun: devices, the links within and between hosts, and collectives, as a `Machine`.

Pairs are measured side by side, each process in one at a time: within the hosts every pair of devices, between hosts
one pair of devices for each pair of hosts, another device of the hosts in every round. In round r of a round-robin of n
players, player i meets player (r - i) mod n, and n - 1 rounds are enough. Of a kind of pair the median by message size is
the link; what differs gets an entry of its own, and what is much slower or loses packets is named in the notes.
Collectives are measured within the hosts and between the first devices of the hosts, in groups of 2, 4, 8 and so on.
Traffic of several pairs over one cable at a time, and other work on the network, are in the measurements as they come.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from gplan.core import COLLECTIVE_KINDS, CollectiveKind, HostLink, Link, Machine, MachineDevice
from gplan.core.errors import UsageError
from gplan.core.progress import Progress
from gplan.core.units import bytes_text, counted, now_text, percent_text, seconds_text
from gplan.runtime.peers import Peer, Peers, check_own_gpu, explained_by_peers, local_place
from gplan.runtime.process_group import backend_of, init_from_environment, rendezvous_from_environment
from gplan_profiler.host.host_info import pin_to_share, processor
from gplan_profiler.host.links import (
    GroupTimer,
    collective_times,
    connected_group,
    deprioritize_connection_threads,
    fit_collective,
    fit_link,
    pair_times,
)
from gplan_profiler.model.memory_budget import available_bytes

_BUDGET_S = 20.0  # of sampling, divided among the rounds and collectives; slow links take longer
_MOST_S = 2.0  # of sampling, for a round or a collective
_OWN_LINK = 1.25  # a link is noted by itself where it takes so many times longer or shorter than those of its kind
_SLOW = 2.0  # and named as slow from this
_SLOW_LATENCY = 4.0  # or, for the smallest message, which varies more, from this
_LOSSY = 0.01  # share of packets that were sent again
_CLOCKS_APART_S = 1.0
_MEMORY_STEP = 2**28  # of what a host has free, so that hosts that are alike have the same

Times = list[tuple[int, float]]
"""Bytes and seconds, by rising bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTimes:
    """What one pair of ranks measured."""

    ranks: tuple[int, int]
    times: Times
    resent: float  # share of the packets that their hosts sent again meanwhile


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTimes:
    """What one group of ranks measured of a collective."""

    ranks: tuple[int, ...]
    kind: CollectiveKind
    times: Times


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFindings:
    """What one rank found."""

    hardware: str
    memory_bytes: int
    clock_s: float  # wall time after a barrier
    pairs: tuple[PairTimes, ...] = ()
    collectives: tuple[CollectiveTimes, ...] = ()


def measure_cluster(*, device_kind: str | None, timeout_s: float, progress: Progress) -> Machine:
    """Measure the devices and links of all processes that torchrun started; each of them returns the same machine.

    `device_kind` is "cpu" or "cuda", by default "cuda" where every process has a GPU. Raises UsageError where there are
    no two processes or their versions differ, RunError where one does not answer for `timeout_s`, naming its host.
    """
    if device_kind not in (None, "cpu", "cuda"):
        raise UsageError(f"device {device_kind!r} cannot be measured; expected 'cpu' or 'cuda'")
    rendezvous = rendezvous_from_environment()
    if rendezvous.num_ranks < 2:
        raise UsageError(
            "there is 1 process; measuring needs at least 2: torchrun --nnodes 2 --nproc-per-node 4 ... -m gplan cluster"
        )
    local_rank, local_size = local_place()
    kind = device_kind or ("cuda" if torch.cuda.device_count() >= local_size else "cpu")
    device = torch.device("cuda", local_rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        check_own_gpu(local_rank, "or use --device cpu")
        torch.cuda.set_device(device)
    else:
        pin_to_share(local_rank, num_shares=local_size, num_threads=1)
    peers = init_from_environment(backend_of(kind), timeout_s=timeout_s, facts={"device": kind})
    with explained_by_peers(peers):
        found = _measured(peers, device, local_size, timeout_s=timeout_s, progress=progress)
        machine = machine_of(peers.peers, found, backend=dist.get_backend())
        dist.barrier()
        dist.destroy_process_group()
    return machine


def _measured(
    peers: Peers, device: torch.device, local_size: int, *, timeout_s: float, progress: Progress
) -> list[RankFindings]:
    """Measure all rounds and groups, in the same order on all ranks; each returns what all found, by rank."""
    hosts = [[x.rank for x in peers.peers if x.host == host] for host in peers.hosts]
    rounds, groups = list(pair_rounds(hosts)), list(collective_groups(hosts))
    parts: list[tuple[str, Sequence[Sequence[int]]]] = [*rounds, *groups]
    budget_s = min(_MOST_S, _BUDGET_S / len(parts))
    pairs, collectives = list[PairTimes](), list[CollectiveTimes]()
    for i, (what, ranks) in enumerate(parts):
        progress(what, i / len(parts))
        own = next((x for x in ranks if peers.rank in x), None)
        if own is not None:
            group = connected_group(
                device,
                dist.PrefixStore(f"part/{i}/{own[0]}", peers.store),  # type: ignore[attr-defined]
                rank=own.index(peers.rank),
                num_ranks=len(own),
                timeout=timedelta(seconds=timeout_s),
            )
            deprioritize_connection_threads()
            timer = GroupTimer(group, device)
            if i < len(rounds):
                before = packets_sent()
                times = pair_times(timer, budget_s=budget_s)
                sent, resent = (x - y for x, y in zip(packets_sent(), before, strict=True))
                first, second = sorted(own)
                pairs.append(PairTimes(ranks=(first, second), times=times, resent=resent / sent if sent else 0.0))
            else:
                for kind in COLLECTIVE_KINDS:
                    times = collective_times(timer, kind, budget_s=budget_s / len(COLLECTIVE_KINDS))
                    collectives.append(CollectiveTimes(ranks=tuple(own), kind=kind, times=times))
        dist.barrier()
    clock_s = time.time()
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        hardware, memory_bytes = torch.cuda.get_device_name(device), int(properties.total_memory)
    else:
        hardware = processor()
        memory_bytes = max(1, available_bytes() // local_size // _MEMORY_STEP) * _MEMORY_STEP
    own_findings = RankFindings(
        hardware=hardware,
        memory_bytes=memory_bytes,
        clock_s=clock_s,
        pairs=tuple(pairs),
        collectives=tuple(collectives),
    )
    found: list[Any] = [None] * len(peers.peers)
    dist.all_gather_object(found, own_findings)
    return found


def pair_rounds(hosts: Sequence[Sequence[int]]) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """What is measured in each round, and its disjoint pairs of ranks; `hosts` has the ranks of each host.

    >>> for what, pairs in pair_rounds([[0, 1], [2, 3]]):
    ...     print(what, pairs)
    links within hosts [(0, 1), (2, 3)]
    links between hosts [(0, 2)]
    """
    most = max(map(len, hosts))
    for meetings in _round_robin(most):
        pairs = [(own[i], own[j]) for own in hosts for i, j in meetings if j < len(own)]
        yield "links within hosts", pairs
    for number, meetings in enumerate(_round_robin(len(hosts))):
        yield (
            "links between hosts",
            [(hosts[i][number % len(hosts[i])], hosts[j][number % len(hosts[j])]) for i, j in meetings],
        )


def _round_robin(num_players: int) -> Iterator[list[tuple[int, int]]]:
    """Rounds of disjoint pairs in which each player meets each other once."""
    if num_players < 2:
        return
    modulus = num_players - 1 + num_players % 2  # with an even number, the last player meets whom nobody else does
    for number in range(modulus):
        pairs = [(i, (number - i) % modulus) for i in range(modulus)]
        if num_players % 2 == 0:
            pairs = [(i, num_players - 1) if i == j else (i, j) for i, j in pairs]
        yield [(i, j) for i, j in pairs if i < j]


def collective_groups(hosts: Sequence[Sequence[int]]) -> Iterator[tuple[str, list[tuple[int, ...]]]]:
    """What is measured, and the disjoint groups of ranks: parts of each host, then the first devices of some hosts.

    >>> for what, groups in collective_groups([[0, 1, 2], [3, 4, 5], [6, 7, 8]]):
    ...     print(what, groups)
    collectives of 2 devices of a host [(0, 1), (3, 4), (6, 7)]
    collectives of 3 devices of a host [(0, 1, 2), (3, 4, 5), (6, 7, 8)]
    collectives of 2 hosts [(0, 3)]
    collectives of 3 hosts [(0, 3, 6)]
    """
    for size in _group_sizes(max(map(len, hosts))):
        groups = [tuple(own[:size]) for own in hosts if len(own) >= size]
        yield f"collectives of {size} devices of a host", groups
    for size in _group_sizes(len(hosts)):
        yield f"collectives of {size} hosts", [tuple(own[0] for own in hosts[:size])]


def _group_sizes(most: int) -> list[int]:
    powers = [2**i for i in range(1, most.bit_length()) if 2**i <= most]
    return sorted({*powers, most} - {1})


def packets_sent() -> tuple[int, int]:
    """TCP segments that this host sent so far, and those of them that it had to send again; 0 where unknown."""
    try:
        names, values = (x.split() for x in Path("/proc/net/snmp").read_text().splitlines() if x.startswith("Tcp:"))
    except (OSError, ValueError):
        return 0, 0
    found = dict(zip(names, values, strict=True))
    return int(found["OutSegs"]), int(found["RetransSegs"])


def machine_of(peers: Sequence[Peer], found: Sequence[RankFindings], *, backend: str) -> Machine:
    """The machine that the ranks measured, with notes on what a reader should know."""
    pairs = {x.ranks: x for findings in found for x in findings.pairs}
    resent = {ranks: max(x.resent for f in found for x in f.pairs if x.ranks == ranks) for ranks in pairs}
    hosts = tuple(dict.fromkeys(x.host for x in peers))
    of_hosts: dict[tuple[str, str], list[Times]] = {}
    for (first, second), pair in pairs.items():
        of_hosts.setdefault((peers[first].host, peers[second].host), []).append(pair.times)
    within = [x for (a, b), times in of_hosts.items() if a == b for x in times]
    between = [x for (a, b), times in of_hosts.items() if a != b for x in times]
    collectives = [x for findings in found for x in findings.collectives]
    links = tuple(
        HostLink(hosts=(a, b), link=_link(times))
        for (a, b), times in of_hosts.items()
        if len(within if a == b else between) > len(times) and _differs(times, within if a == b else between)
    )
    now = now_text()
    sizes = {sum(x.host == host for x in peers) for host in hosts}
    of_each = f"{counted(min(sizes), 'device')} each" if len(sizes) == 1 else f"{len(peers)} devices"
    missing = "" if within and between else "; links within hosts were not measured" if between else ""
    facts, kinds = peers[0].facts, sorted({x.hardware for x in found})
    hardware_note = (
        f"the devices differ ({', '.join(kinds)}): write their speeds, relative to the profiled one, into the file",
    )
    return Machine(
        devices=tuple(
            MachineDevice(
                name=f"{x.host}:{x.local_rank}", host=x.host, memory_bytes=f.memory_bytes, hardware=f.hardware
            )
            for x, f in zip(peers, found, strict=True)
        ),
        within=_with_collectives(_link(within or between), collectives, peers, is_within=True),
        between=_with_collectives(_link(between or within), collectives, peers, is_within=False),
        links=links,
        notes=(
            f"measured {now} by gplan {facts['gplan']}, torch {facts['torch']}, {backend}: "
            f"{counted(len(hosts), 'host')} of {of_each}{missing}",
            *_pair_notes(pairs, resent, peers, within, between),
            *(hardware_note if len(kinds) > 1 else ()),
            *_clock_notes(peers, found),
        ),
    )


def _link(all_times: Sequence[Times]) -> Link:
    sizes, seconds = zip(*_medians(all_times), strict=True)
    return fit_link(sizes, seconds)


def _medians(all_times: Sequence[Times]) -> Times:
    """The median seconds by size, of the sizes that all measured."""
    by_size = [dict(times) for times in all_times]
    return [(size, median(x[size] for x in by_size)) for size in sorted(set.intersection(*map(set, by_size)))]


def _with_collectives(link: Link, found: Sequence[CollectiveTimes], peers: Sequence[Peer], *, is_within: bool) -> Link:
    """The link with the collectives of one host's devices, or of several hosts'; the median of the groups."""
    own = [x for x in found if (len({peers[rank].host for rank in x.ranks}) == 1) == is_within]
    groups: dict[tuple[CollectiveKind, int], list[Times]] = {}
    for x in own:
        groups.setdefault((x.kind, len(x.ranks)), []).append(x.times)
    return replace(
        link, collectives=tuple(fit_collective(*key, _medians(times)) for key, times in sorted(groups.items()))
    )


def _ratios(times: Times, usual: Sequence[Times]) -> tuple[float, float]:
    """How many times longer than usual the smallest and the largest message take that all measured."""
    own = dict(times)
    ratios = [own[size] / seconds for size, seconds in _medians(usual) if size in own]
    return ratios[0], ratios[-1]


def _differs(times: Sequence[Times], usual: Sequence[Times]) -> bool:
    ratio = _ratios(_medians(times), usual)[1]
    return max(ratio, 1 / ratio) > _OWN_LINK


def _pair_notes(
    pairs: dict[tuple[int, int], PairTimes],
    resent: dict[tuple[int, int], float],
    peers: Sequence[Peer],
    within: Sequence[Times],
    between: Sequence[Times],
) -> Iterator[str]:
    lossy = list[str]()
    for (first, second), pair in pairs.items():
        name = " - ".join(f"{peers[x].host}:{peers[x].local_rank}" for x in (first, second))
        share = resent[first, second]
        if share > _LOSSY:
            lossy.append(f"lossy: the pair {name} had to send {percent_text(share)} of its packets again")
        usual = within if peers[first].host == peers[second].host else between
        small, large = _ratios(pair.times, usual)
        if len(usual) > 2 and (large > _SLOW or small > _SLOW_LATENCY):
            num_bytes, seconds = pair.times[-1 if large > _SLOW else 0]
            yield (
                f"slow: the pair {name} takes {seconds_text(seconds)} for {bytes_text(num_bytes)}, "
                f"{large if large > _SLOW else small:.1f} times as long as such pairs usually do here"
            )
    yield from lossy


def _clock_notes(peers: Sequence[Peer], found: Sequence[RankFindings]) -> Iterator[str]:
    """Clocks are read after a barrier, so what they differ by beyond a second is theirs."""
    seen = {peer.host: x.clock_s for peer, x in zip(peers, found, strict=True)}
    for a, b in combinations(seen, 2):
        if a == peers[0].host and abs(seen[b] - seen[a]) > _CLOCKS_APART_S:
            ahead = "ahead of" if seen[b] > seen[a] else "behind"
            yield f"the clock of {b} is {seconds_text(abs(seen[b] - seen[a]))} {ahead} that of {a}: set them by NTP"
