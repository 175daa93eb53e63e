"""drafttrain: train drafters for speculative decoding, and measure them.

The names below are the Python API (docs/python.md). Each is loaded when it is first used: importing the package loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from drafttrain.api.decoding import Generation as Generation
    from drafttrain.api.decoding import Measurement as Measurement
    from drafttrain.api.decoding import generate as generate
    from drafttrain.api.decoding import measure_drafter as measure_drafter
    from drafttrain.api.drafter import LoadedDrafter as LoadedDrafter
    from drafttrain.api.drafter import build_drafter as build_drafter
    from drafttrain.api.drafter import export_drafter as export_drafter
    from drafttrain.api.drafter import load_drafter as load_drafter
    from drafttrain.api.drafter import save_drafter as save_drafter
    from drafttrain.api.following import FollowCallback as FollowCallback
    from drafttrain.api.online import OnlineDrafter as OnlineDrafter
    from drafttrain.api.settings import load_target as load_target
    from drafttrain.api.training import TrainingRun as TrainingRun
    from drafttrain.api.training import auto as auto
    from drafttrain.api.training import batches as batches
    from drafttrain.api.training import loss as loss
    from drafttrain.api.training import train_drafter as train_drafter
    from drafttrain.core.errors import UserError as UserError
    from drafttrain.engines.draft_push import ReloadedDirectory as ReloadedDirectory
    from drafttrain.targets.load import LoadedTarget as LoadedTarget
    from drafttrain.train.following import StepMetrics as StepMetrics

HOMES = {
    "FollowCallback": "api.following",
    "Generation": "api.decoding",
    "LoadedDrafter": "api.drafter",
    "LoadedTarget": "targets.load",
    "Measurement": "api.decoding",
    "OnlineDrafter": "api.online",
    "ReloadedDirectory": "engines.draft_push",
    "StepMetrics": "train.following",
    "TrainingRun": "api.training",
    "UserError": "core.errors",
    "auto": "api.training",
    "batches": "api.training",
    "build_drafter": "api.drafter",
    "export_drafter": "api.drafter",
    "generate": "api.decoding",
    "load_drafter": "api.drafter",
    "load_target": "api.settings",
    "loss": "api.training",
    "measure_drafter": "api.decoding",
    "save_drafter": "api.drafter",
    "train_drafter": "api.training",
}
__all__ = [*HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *HOMES})
