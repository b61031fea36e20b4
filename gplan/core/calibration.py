"""What running plans taught about a profile: factors on its figures,
and how far predictions were off before and after."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gplan.core.checks import check_factor, check_not_negative, check_positive
from gplan.core.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileId:
    """Which profile: a model measured on a device at a time."""

    digest: str  # of the model
    device: str
    created: str

    @classmethod
    def of(cls, profile: Profile) -> ProfileId:
        """That of a profile."""
        return cls(digest=profile.model.digest, device=profile.device.name, created=profile.created)


@dataclass(frozen=True, slots=True, kw_only=True)
class KindDrift:
    """By what the times of all layers of one kind are multiplied."""

    kind: str
    forward: float
    backward: float  # in one piece or in halves, and what recomputing adds to it

    def __post_init__(self) -> None:
        check_factor(self, "forward", "backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """A plan that taught nothing: its measured step, and what was predicted of it without and with the calibration."""

    label: str
    measured_s: float
    before_s: float
    after_s: float

    def __post_init__(self) -> None:
        check_positive(self, "measured_s", "before_s", "after_s")

    @property
    def error_before(self) -> float:
        """As a share of what was measured; positive where the prediction was too high."""
        return self.before_s / self.measured_s - 1.0

    @property
    def error_after(self) -> float:
        """As `error_before`, with the calibration."""
        return self.after_s / self.measured_s - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Factors on the figures of one profile, learned from runs; 1 where there was nothing to learn from."""

    profile: ProfileId
    engine: str  # of the runs
    num_devices: int  # of the plans, in one replica
    kinds: tuple[KindDrift, ...]
    contention: float  # on how much longer layers take in the company of that many devices
    optimizer: float
    link: float  # on the seconds of every transfer
    action_s: float  # what the engine takes after every action, in seconds, not as a factor
    learned_from: tuple[str, ...]  # the labels of the plans
    held_out: tuple[HeldOut, ...]
    created: str  # ISO 8601, UTC

    def __post_init__(self) -> None:
        check_positive(self, "num_devices")
        check_factor(self, "contention", "optimizer", "link")
        check_not_negative(self, "action_s")

    @property
    def helps(self) -> bool:
        """Whether the plans that taught nothing are predicted better with it: less squared error of the logarithms."""
        before, after = (
            math.fsum(math.log(predicted_s / x.measured_s) ** 2 for x, predicted_s in pairs)
            for pairs in (
                [(x, x.before_s) for x in self.held_out],
                [(x, x.after_s) for x in self.held_out],
            )
        )
        return after < before

    def belongs_to(self, profile: Profile) -> bool:
        """Whether it was learned for this very profile."""
        return self.profile == ProfileId.of(profile)
