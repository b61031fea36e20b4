"""Calibration: factors on the numbers of a profile, fitted to runs, with the prediction errors before and after."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gplan.core.checks import check_factor, check_not_negative, check_positive
from gplan.core.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileId:
    """The identity of a profile: model, device and time."""

    digest: str  # of the model
    device: str
    created: str

    @classmethod
    def of(cls, profile: Profile) -> ProfileId:
        """The identity of a profile."""
        return cls(digest=profile.model.digest, device=profile.device.name, created=profile.created)


@dataclass(frozen=True, slots=True, kw_only=True)
class KindDrift:
    """Factors on the times of all layers of one kind."""

    kind: str
    forward: float
    backward: float  # also for its halves and recompute

    def __post_init__(self) -> None:
        check_factor(self, "forward", "backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """A plan that was not used for fitting: its measured step, and predictions without and with the calibration."""

    label: str
    measured_s: float
    before_s: float
    after_s: float
    slowdown: float | None = None  # of the host while it was measured, over the profile; None: unknown

    def __post_init__(self) -> None:
        check_positive(self, "measured_s", "before_s", "after_s")
        if self.slowdown is not None:
            check_factor(self, "slowdown")

    @property
    def error_before(self) -> float:
        """Relative error of the prediction without calibration; positive if it was too high."""
        return self.before_s / self.measured_s - 1.0

    @property
    def error_after(self) -> float:
        """Relative error of the prediction with the calibration."""
        return self.after_s / self.measured_s - 1.0

    @property
    def equal_speed_ratios(self) -> tuple[float, float]:
        """Both predictions over the measured step, brought to the speed of the profile where that is known."""
        measured_s = self.measured_s / (self.slowdown or 1.0)
        return self.before_s / measured_s, self.after_s / measured_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Factors on the numbers of one profile, fitted to runs; 1 where there was no data."""

    profile: ProfileId
    engine: str  # of the runs
    num_devices: int  # of the plans, in one replica
    kinds: tuple[KindDrift, ...]
    contention: float  # on the slow-down of layers with that many devices
    optimizer: float
    link: float  # on the seconds of every transfer
    action_s: float  # overhead of the engine after every action: seconds, not a factor
    learned_from: tuple[str, ...]  # the labels of the plans
    held_out: tuple[HeldOut, ...]
    created: str  # ISO 8601, UTC

    def __post_init__(self) -> None:
        check_positive(self, "num_devices")
        check_factor(self, "contention", "optimizer", "link")
        check_not_negative(self, "action_s")

    @property
    def helps(self) -> bool:
        """Whether held-out plans are predicted better with it, by the squared error of logarithms at equal speed."""
        before, after = (
            math.fsum(math.log(ratios[i]) ** 2 for ratios in (x.equal_speed_ratios for x in self.held_out))
            for i in range(2)
        )
        return after < before

    def belongs_to(self, profile: Profile) -> bool:
        """Whether it was fitted for this profile."""
        return self.profile == ProfileId.of(profile)
