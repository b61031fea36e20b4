"""The nouns: frozen values that every other room passes along. None reads a file, draws or imports torch."""

from gplan.nouns.checks import (
    OBJECTIVES,
    RECOMPUTE_MODES,
    LossReduction,
    Objective,
    OperationKind,
    Origin,
    RecomputeMode,
)
from gplan.nouns.cost import LayerCost, StepCost, Timing, WholeModel, Work
from gplan.nouns.machine import Device, Link, LinkPoint
from gplan.nouns.plan import GradientCheck, Plan, Prediction, Proof, Run, Stage, StageCost, StageMemory
from gplan.nouns.profile import Layer, ModelId, Profile, SharedWeight
from gplan.nouns.schedule import Action, ActionKind, Idle, IdleCause, Schedule, Span, Timeline, Transfer

__all__ = [
    "OBJECTIVES",
    "RECOMPUTE_MODES",
    "Action",
    "ActionKind",
    "Device",
    "GradientCheck",
    "Idle",
    "IdleCause",
    "Layer",
    "LayerCost",
    "Link",
    "LinkPoint",
    "LossReduction",
    "ModelId",
    "Objective",
    "OperationKind",
    "Origin",
    "Plan",
    "Prediction",
    "Profile",
    "Proof",
    "RecomputeMode",
    "Run",
    "Schedule",
    "SharedWeight",
    "Span",
    "Stage",
    "StageCost",
    "StageMemory",
    "StepCost",
    "Timeline",
    "Timing",
    "Transfer",
    "WholeModel",
    "Work",
]
