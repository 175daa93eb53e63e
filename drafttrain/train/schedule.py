"""The learning rate schedule: a function of the step alone, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from drafttrain.train import TrainOptions


def learning_rate(options: TrainOptions, step: int, first_steps: int | None = None) -> float:
    """The learning rate of `step` (from 0): linear warm-up, then cosine, wsd (warmup-stable-decay, linear) or constant.

    first_steps: the number of steps at the beginning of a run that was lengthened; its warm-up is behind it and stays.

    Example: 100 steps, warmup 0.1, schedule wsd, decay 0.2: rises over steps 0-9, is constant to step 79, then falls.
    """
    warmup_steps = round(options.warmup * (first_steps or options.steps))
    if step < warmup_steps:
        return options.lr * (step + 1) / warmup_steps
    if options.schedule == "constant":
        return options.lr
    if options.schedule == "cosine":
        fraction = (step - warmup_steps) / max(1, options.steps - warmup_steps)
        return options.lr * (options.min_lr + (1 - options.min_lr) * 0.5 * (1 + math.cos(math.pi * fraction)))
    decay_steps = max(1, round(options.decay * options.steps))
    remaining = min(1.0, (options.steps - step) / decay_steps)
    return options.lr * (options.min_lr + (1 - options.min_lr) * remaining)
