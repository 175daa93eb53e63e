"""Drafters that follow a model in a trainer of transformers or TRL."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from drafttrain.api.online import OnlineDrafter
from drafttrain.core.files import atomic_write_bytes
from drafttrain.features.padded import PassRecorder
from drafttrain.model.target import Taps
from drafttrain.train.following import StepMetrics


class FollowCallback(TrainerCallback):
    """Trains drafters in a `Trainer`, `SFTTrainer` or `GRPOTrainer`, with the states of the trainer's own passes.

    Before every optimiser step of the trainer each drafter takes one of its own, on the passes since the last one, with the
    weights that made their states. `labels` say which tokens are supervised. Packed rows (`position_ids`) are not used.

    The trainer's checkpoints get a file for each drafter, and `trainer.train(resume_from_checkpoint=True)` goes on from it.

    Args:
        *drafters: Drafters whose target is the trainer's model.
        every: Steps of the trainer per step of the drafters.
        keep: Passes that are kept for a step, at most. Their states stay in memory until then.
        report: Called with the trainer's step and the figures of each drafter.
    """

    def __init__(
        self,
        *drafters: OnlineDrafter,
        every: int = 1,
        keep: int = 8,
        report: Callable[[int, list[StepMetrics]], None] | None = None,
    ) -> None:
        self.drafters, self.every, self.keep, self.report = drafters, max(1, every), keep, report
        self._recorder: PassRecorder | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        taps = Taps()
        for drafter in self.drafters:
            taps = taps | drafter.taps
        self.close()
        self._recorder = PassRecorder(self.drafters[0].target, taps, self.keep)
        for drafter, file in zip(self.drafters, self._files(args, state), strict=True):
            if file.is_file():
                drafter.load_state_dict(load_file(file))
            elif state.global_step:
                warnings.warn(
                    f"the trainer goes on from a checkpoint without {file}; this drafter goes on as it is", stacklevel=2
                )

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for drafter, file in zip(self.drafters, self._files(args, state), strict=True):
            if args.should_save:
                atomic_write_bytes(file, save(drafter.state_dict(buffer=False)))

    def _files(self, args: Any, state: Any) -> list[Path]:
        folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        return [folder / f"drafter-{number}.safetensors" for number in range(len(self.drafters))]

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._recorder is None or (state.global_step + 1) % self.every:
            return
        passes = self._recorder.take()
        metrics = [drafter.step_on(passes, version=state.global_step) for drafter in self.drafters]
        if self.report is not None:
            self.report(state.global_step, metrics)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()

    def close(self) -> None:
        """Remove the hooks from the model."""
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None
