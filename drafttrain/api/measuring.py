"""Measure a drafter."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from drafttrain.api.drafter import LoadedDrafter, for_recipe, save_drafter
from drafttrain.api.settings import given
from drafttrain.cli.main import user_errors
from drafttrain.core.files import atomic_write_text, new_directory
from drafttrain.measure.runner import CheckpointRef
from drafttrain.runs.paths import dated_path
from drafttrain.targets.load import LoadedTarget

PROMPTS, DRAFTER = "prompts.jsonl", "drafter"


@dataclass(frozen=True, slots=True)
class Measurement:
    """The headline figures of a report. docs/metrics.md defines them all."""

    tau: float | None  # tokens per verification, the bonus token included; None without a verification
    alpha: float | None  # share of offered drafts that were accepted
    speedup: float | None  # plain decoding's time per token / this drafter's, median over the repeats; None if not timed
    tokens_per_s: float | None  # with the drafter, after each text's first token
    plain_tokens_per_s: float | None  # without
    prompts: int  # texts that were compared
    exact_matches: int | None  # texts whose tokens are plain decoding's; None when sampling
    folder: Path  # report.html, report.md, report.json
    report: dict[str, Any]  # report.json (docs/report-schema.md)

    @property
    def exact(self) -> bool | None:
        """Whether every text has plain decoding's tokens; None when sampling. In bfloat16 rounding can change a token."""
        return None if self.exact_matches is None else self.exact_matches == self.prompts


def measure_drafter(
    target: LoadedTarget,
    drafter: LoadedDrafter,
    *,
    prompts: str | Path | Sequence[str | Sequence[str]] = "embedded",
    max_new_tokens: int | None = None,
    minutes: float | None = None,
    out: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> Measurement:
    """Measure acceptance, speed and exactness against plain decoding of the same target, and write a report.

    Args:
        target: The target that the drafter was built for.
        drafter: The drafter. One that was not loaded from a checkpoint is saved to `<out>/drafter` first.
        prompts: A list of texts (or of lists of a user's turns), a prompt file, or public sets by name (`mt_bench`).
        max_new_tokens: Of each text (`decode.max_new_tokens`).
        minutes: Time budget (`measure.minutes`). When it is short, fewer repeats and prompts are timed.
        out: The report's folder. None: `outputs/measure/<time>`.
        settings: Any other key of the groups `measure` and `decode`: `{"decode": "sampling", "measure.batch_sizes": [1, 8]}`.
        quiet: Print nothing.

    Returns:
        The figures. With a drafter that adapts the target, `exact` compares with the adapted target.

    Raises:
        UserError: The prompts cannot be read, a setting is unknown, or the drafter is of another target.
    """
    from drafttrain.commands.measure import measure_run, measured, print_report, write_anew  # it imports DeepSpeed's callers

    drafter.check(target)
    overrides = given({"decode.max_new_tokens": max_new_tokens, "measure.minutes": minutes})
    options = for_recipe(drafter.recipe, {**drafter.settings, **overrides, **(settings or {})}, target).options
    is_named, base, console = isinstance(prompts, str | Path), dated_path("outputs", "measure"), Console(quiet=quiet)
    folder = Path(out) if out is not None else None
    if folder is not None:
        _keep(folder, prompts, drafter)
    elif not is_named or drafter.checkpoint is None:
        folder = new_directory(base, lambda staging_dir: _keep(staging_dir, prompts, drafter))
    options.prompts = str(prompts if is_named or folder is None else folder / PROMPTS)
    path = drafter.checkpoint or (folder or base) / DRAFTER
    refs = [CheckpointRef(path.name, path, None)]
    with user_errors():
        if folder is not None:
            report = measure_run(target, refs, options, folder, console)
        else:
            report = measured(target, refs, options, console)
            folder = write_anew(base, report, target)
            print_report(report, folder, console)
    entry = report["checkpoints"][0]
    return Measurement(
        tau=entry["tau"],
        alpha=entry["alpha"],
        speedup=entry["speedup"],
        tokens_per_s=entry["tokens_per_s"],
        plain_tokens_per_s=entry["baseline_tokens_per_s"],
        prompts=entry["prompts"],
        exact_matches=entry["exact_matches"],
        folder=folder,
        report=report,
    )


def _keep(folder: Path, prompts: str | Path | Sequence[str | Sequence[str]], drafter: LoadedDrafter) -> None:
    """Write what has no file yet next to the report, which names it: prompts given as texts, and the drafter."""
    if drafter.checkpoint is None:
        save_drafter(drafter, folder / DRAFTER)
    if isinstance(prompts, str | Path):
        return
    turns = [[prompt] if isinstance(prompt, str) else list(prompt) for prompt in prompts]
    lines = [json.dumps({"question_id": i, "category": "own", "turns": turn}) for i, turn in enumerate(turns, start=1)]
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write_text(folder / PROMPTS, "\n".join(lines) + "\n")
