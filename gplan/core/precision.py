"""The precision of a training: what parameters are stored in, what is computed in, how gradients are accumulated.

`mixed` is what Megatron-LM and DeepSpeed call bf16 training: stages compute with bfloat16 copies of float32 master
weights, which the optimizer updates. `autocast` is torch.autocast: float32 parameters, and each operation in bfloat16
where torch lists it as safe. float16 is left out, as it needs a loss scaler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from gplan.core.errors import UsageError

FloatType: TypeAlias = Literal["float32", "bfloat16"]
"""What a number is stored in, by torch's name."""

PrecisionName: TypeAlias = Literal["model", "float32", "bfloat16", "mixed", "mixed-bf16-gradients", "autocast"]
"""What users choose: as the model file makes it; all in one type; or one of the mixtures of `PRECISIONS`."""

PRECISION_NAMES: tuple[str, ...] = get_args(PrecisionName)


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """What a training stores and computes in; None: as the model file makes it.

    >>> Precision.named("mixed").gradients, Precision.named("mixed").name, Precision().name
    ('float32', 'mixed', 'model')
    """

    parameters: FloatType | None = None  # of the stages, and floating-point buffers
    compute: FloatType | None = None  # of forward and backward, and so of activations
    gradients: FloatType | None = None  # accumulated over the micro-batches of a step
    master_weights: bool = False  # whether the optimizer updates float32 copies of the parameters, which are kept

    def __post_init__(self) -> None:
        if self._values not in _NAMES:
            raise ValueError(f"precision is {self._values}; expected one of {', '.join(PRECISION_NAMES)}")

    @classmethod
    def named(cls, name: str) -> Precision:
        """The precision of this name; raises UsageError for one that there is not."""
        if name == "float16":
            raise UsageError(
                "precision float16 needs a loss scaler, which gplan does not have; use bfloat16, mixed or autocast"
            )
        if name not in _PRECISIONS:
            raise UsageError(f"precision {name!r} is not known; expected one of {', '.join(PRECISION_NAMES)}")
        parameters, compute, gradients, master_weights = _PRECISIONS[name]
        return cls(parameters=parameters, compute=compute, gradients=gradients, master_weights=master_weights)

    @property
    def name(self) -> str:
        """What users call it."""
        return _NAMES[self._values]

    @property
    def autocast(self) -> bool:
        """Whether operations run under torch.autocast."""
        return self.compute != self.parameters

    @property
    def _values(self) -> _Values:
        return self.parameters, self.compute, self.gradients, self.master_weights


_Values: TypeAlias = tuple[FloatType | None, FloatType | None, FloatType | None, bool]

_PRECISIONS: dict[str, _Values] = {
    "model": (None, None, None, False),
    "float32": ("float32", "float32", "float32", False),
    "bfloat16": ("bfloat16", "bfloat16", "bfloat16", False),
    "mixed": ("bfloat16", "bfloat16", "float32", True),
    "mixed-bf16-gradients": ("bfloat16", "bfloat16", "bfloat16", True),
    "autocast": ("float32", "bfloat16", "float32", False),
}
_NAMES: dict[_Values, str] = {values: name for name, values in _PRECISIONS.items()}

AS_MADE = Precision()
"""The precision of the model file."""


def precision_suffix(precision: Precision) -> str:
    """The end of a line on a plan: ", precision mixed"; "" for the precision of the model file."""
    return "" if precision == AS_MADE else f", precision {precision.name}"
