"""The nouns: frozen values that every other room passes along. None reads a file, draws or imports torch."""

from gplan.nouns.calibration import Calibration, HeldOut, KindDrift, ProfileId
from gplan.nouns.checks import (
    OBJECTIVES,
    RECOMPUTE_MODES,
    Granularity,
    LossReduction,
    Objective,
    OperationKind,
    Origin,
    RecomputeMode,
)
from gplan.nouns.cost import LayerCost, StepCost, Timing, Waiting, WholeModel, Work
from gplan.nouns.machine import Device, EngineCost, HostLink, Link, LinkPoint, Machine, Place
from gplan.nouns.memory import StageBytes
from gplan.nouns.plan import Alternative, GradientCheck, Plan, Prediction, Proof, Run, Stage, StageCost, StageMemory
from gplan.nouns.profile import Layer, ModelId, Profile, SharedWeight
from gplan.nouns.schedule import BACKWARD_KINDS, Action, ActionKind, Idle, IdleCause, Schedule, Span, Timeline, Transfer
from gplan.nouns.value import Value, ValueCost
from gplan.nouns.verification import Contender, LeftOut, Verification
from gplan.nouns.wishes import Pin, Wishes

__all__ = [
    "BACKWARD_KINDS",
    "OBJECTIVES",
    "RECOMPUTE_MODES",
    "Action",
    "ActionKind",
    "Alternative",
    "Calibration",
    "Contender",
    "Device",
    "EngineCost",
    "GradientCheck",
    "Granularity",
    "HeldOut",
    "HostLink",
    "Idle",
    "IdleCause",
    "KindDrift",
    "Layer",
    "LayerCost",
    "LeftOut",
    "Link",
    "LinkPoint",
    "LossReduction",
    "Machine",
    "ModelId",
    "Objective",
    "OperationKind",
    "Origin",
    "Pin",
    "Place",
    "Plan",
    "Prediction",
    "Profile",
    "ProfileId",
    "Proof",
    "RecomputeMode",
    "Run",
    "Schedule",
    "SharedWeight",
    "Span",
    "Stage",
    "StageBytes",
    "StageCost",
    "StageMemory",
    "StepCost",
    "Timeline",
    "Timing",
    "Transfer",
    "Value",
    "ValueCost",
    "Verification",
    "Waiting",
    "WholeModel",
    "Wishes",
    "Work",
]
