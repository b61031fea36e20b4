"""Computed profiles of language models by the sizes of their configurations."""

from __future__ import annotations

from typing import Any

from gplan.core import Profile
from gplan_profiler.analytic.decoder_config import Widths, load_decoder
from gplan_profiler.analytic.decoder_profile import DecoderProfile, check_divisions
from gplan_profiler.analytic.hardware import load_hardware


def decoder_profile(name: str, *, hardware: str = "h100", sequence_length: int = 4096, **widths: Any) -> Profile:
    sizes = Widths(sequence_length=sequence_length, **widths)
    found = DecoderProfile(name=name, decoder=load_decoder(name), widths=sizes, hardware=load_hardware(hardware))
    divided = {"tensor": sizes.tensor, "context": sizes.context, "expert": sizes.expert}
    check_divisions(found.decoder, **divided, sequence_length=sequence_length)
    return found.profile((1,))
