"""What cannot be trained on rows that hold several conversations."""

from __future__ import annotations

from drafttrain.core.errors import UserError
from drafttrain.model.drafter import Drafter
from drafttrain.targets.adapt import Adapter
from drafttrain.targets.hf import HFTarget
from drafttrain.train import TrainOptions
from drafttrain.train.ulysses import language_models


def check_packing(
    pack: bool, options: TrainOptions, target: HFTarget, drafter: Drafter, adapter: Adapter | None, answers: bool = False
) -> None:
    """Raise UserError for what cannot be trained with `data.pack`. answers: the target writes them during training."""
    if not pack:
        return
    if answers:
        raise UserError(
            "data.pack fills rows by the lengths of the given replies, but with features.answers the target writes others; "
            "leave one out"
        )
    if options.on_policy:
        raise UserError("train.on_policy needs one conversation per row, but data.pack puts several in a row; leave one out")
    for what, model in language_models(target, drafter, adapter) if drafter.trained else ():
        if model.recurrent:
            raise UserError(
                f"data.pack puts several conversations in a row, and the recurrent layers of {what}, "
                f"{type(model.model).__name__}, would carry each one's state into the next; set data.pack=false"
            )
