"""Value types that all other packages exchange: frozen dataclasses without file access, drawing or torch."""

from gplan.core.checks import (
    COLLECTIVE_KINDS,
    OBJECTIVES,
    RECOMPUTE_MODES,
    CollectiveKind,
    Granularity,
    LossReduction,
    Objective,
    OperationKind,
    Origin,
    RecomputeMode,
    Sharding,
)
from gplan.core.host_load import EqualSpeed, HostLoad
from gplan.core.layer_cost import LayerCost, Leftover, StepCost, Timing, WholeModel, Work
from gplan.core.machine import Collective, Device, EngineCost, HostLink, Link, LinkPoint, Machine, MachineDevice
from gplan.core.plan import (
    Alternative,
    Constraints,
    GradientCheck,
    HostBound,
    Pin,
    Plan,
    Prediction,
    Proof,
    Run,
    Stage,
    StageBytes,
    StageMemory,
    WholeBatch,
)
from gplan.core.precision import Precision, PrecisionName
from gplan.core.profile import Layer, ModelId, Profile, SharedWeight, Value, ValueCost
from gplan.core.schedule import (
    BACKWARD_KINDS,
    Action,
    ActionKind,
    Idle,
    IdleCause,
    Schedule,
    Span,
    Timeline,
    Transfer,
    idle_share,
    is_recomputed,
    runs_forward_again,
)
from gplan.core.stage_cost import Floats, Seconds, StageCost, StageSeconds, StageTimes
from gplan.core.verification import Contender, LeftOut, Verification
