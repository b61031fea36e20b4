"""What else differs between two profiles: where it does, a time may have changed without the model."""

from __future__ import annotations

from collections.abc import Iterator

from gplan.nouns import Profile


def remarks_on(old: Profile, new: Profile) -> Iterator[str]:
    """Machine, versions, settings and what else is not alike, then what either profile notes of itself."""
    before, after = _facts(old), _facts(new)
    for name in dict.fromkeys([*before, *after]):
        found, expected = after.get(name, "none"), before.get(name, "none")
        if found != expected:
            yield f"{name}: {expected} → {found}"
    for note in dict.fromkeys([*old.notes, *new.notes]):
        sides = [side for side, profile in (("old", old), ("new", new)) if note in profile.notes]
        yield f"of the {' and the '.join(sides)} profile: {note}"


def _facts(profile: Profile) -> dict[str, str]:
    """What should be alike for the times to speak of the model alone."""
    device = profile.device
    return {
        "model": profile.model.name,
        "digest of layers and parameters": profile.model.digest,
        **{f"setting {name}": value for name, value in profile.model.settings},
        "machine": f"{device.name} ({device.kind})",
        "threads": str(device.num_threads),
        **{f"version of {name}": version for name, version in profile.versions},
        "micro-batch sizes": ", ".join(map(str, profile.microbatch_sizes)),
        "optimizer": profile.step.optimizer_name,
        "loss over the samples": profile.loss_reduction if profile.loss else "none",
        "figures": profile.origin,
        "processes beside the measured one": str(profile.num_neighbours),
    }
