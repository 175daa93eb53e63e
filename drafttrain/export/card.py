"""README.md of an exported directory, the model card: target, training, measured acceptance, and the command that serves it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from drafttrain import __version__
from drafttrain.export.drafter_adapter import about, merged_place
from drafttrain.export.files import ExportSource
from drafttrain.export.hub import Repository, is_repository
from drafttrain.export.parity import Parity
from drafttrain.export.serve import STACKS
from drafttrain.export.table import row_of, serving_command

TAGS = ["speculative-decoding", "drafttrain"]
FROZEN = (
    "It drafts tokens for this target and for no other. The target verifies every draft, so that its output does not change."
)
ADAPTED = (
    "The target was trained together with this drafter. The trained target is in the folder `target` next to it: serve that "
    "one. Its output differs from the original target's."
)
APART = (
    "The target was trained together with this drafter. The trained part is in the folder `target` next to it, as a peft "
    "adapter: merge it into the original target, and serve the result. Its output differs from the original target's."
)
MERGE = (
    "from peft import AutoPeftModelForCausalLM\n"
    "AutoPeftModelForCausalLM.from_pretrained({adapter!r}).merge_and_unload().save_pretrained({merged!r})"
)


@dataclass(frozen=True, slots=True)
class CardFigures:
    """The measured figures in the run's report.json; None for a figure that was not measured."""

    tau: float | None = None  # accepted length: tokens per decode step
    speedup: float | None = None  # speed relative to plain decoding
    policy: str | None = None
    device: str | None = None
    data: str | None = None  # path of the training data
    steps: int | None = None  # training steps

    @staticmethod
    def of(checkpoint: Path) -> CardFigures:
        """The figures of this checkpoint. All are None where the run has no report, or none of this checkpoint."""
        try:
            report = json.loads((checkpoint.resolve().parent.parent / "report.json").read_text(encoding="utf-8"))
            entry: dict[str, Any] = next((c for c in report["checkpoints"] if c["name"] == checkpoint.resolve().name), {})
            training = report["training"] or {}
            return CardFigures(
                entry.get("tau"),
                entry.get("speedup"),
                entry.get("policy"),
                report["environment"].get("device"),
                (training.get("data") or {}).get("path"),
                training.get("steps"),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return CardFigures()


def card(source: ExportSource, layout: str, place: str | Repository, parity: Parity, apart: bool = False) -> str:
    """The text of the model card. place: the final directory of the export, or the repository that it is uploaded to.

    apart: the files are an adapter of the drafter, and its command is that of the merged drafter.
    """
    meta, measured = source.opened.meta, CardFigures.of(source.opened.directory)
    base = {"base_model": source.target_name} if is_repository(source.target_name) else {}  # the hub takes no directories
    front_matter = yaml.safe_dump(base | {"tags": TAGS}, sort_keys=False)
    rows: dict[str, Any] = {
        "target": f"`{source.target_name}` ({source.target_architecture}, fingerprint `{meta.target.fingerprint[:12]}`)",
        "family": meta.family,
        "layout": f"{layout}, {source.dtype}",
        "trained": _trained(source, measured),
        "measured": _measured(measured),
        "parity": _parity(source, parity),
        "written by": f"drafttrain {__version__}",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    stack = STACKS[source.stack]
    language = "python" if stack.python else "bash"
    loads_by_name = stack.by_name and source.merged is None and not apart
    needs_download = isinstance(place, Repository) and not loads_by_name
    directory = place if isinstance(place, str) else place.folder if needs_download else place.name
    sections = [
        f"---\n{front_matter}---",
        f"# {meta.family} drafter for {source.target_name}",
        _about_target(source),
        f"| | |\n|---|---|\n{table}",
        *(
            [f"The command below reads the files from a directory. Download them first: `{place.download}`."]
            if isinstance(place, Repository) and needs_download
            else []
        ),
        *([about(directory)] if apart else []),
        f"```{language}\n{serving_command(source, merged_place(directory) if apart else directory)}\n```",
    ]
    note = row_of(meta.family, source.stack).note
    return "\n\n".join(sections + ([note] if note else [])) + "\n"


def _about_target(source: ExportSource) -> str:
    if source.adapter is None:
        return ADAPTED if source.merged else FROZEN
    return f"{APART}\n\n```python\n{MERGE.format(adapter=source.adapter, merged=source.merged)}\n```"


def _trained(source: ExportSource, measured: CardFigures) -> str:
    meta = source.opened.meta
    if meta.imported is not None:
        return f"by other people, imported from `{meta.imported['from']}` ({meta.imported['layout']}, {meta.imported['dtype']})"
    return f"{meta.step} steps" + (f" on `{measured.data}`" if measured.data else "")


def _measured(measured: CardFigures) -> str:
    if measured.tau is None:
        return "no: the training run has no report"
    speed = "" if measured.speedup is None else f", {measured.speedup:.2f}x the speed of plain decoding"
    device = "" if measured.device is None else f" on {measured.device}"
    return f"tau {measured.tau:.2f} tokens per decode step (policy {measured.policy}){speed}, in drafttrain's decoder{device}"


def _parity(source: ExportSource, parity: Parity) -> str:
    text = f"these files give the same {parity.drafts} golden drafts and logits as the checkpoint"
    if source.dtype == "float32":
        return text
    return f"{text} with weights rounded to {source.dtype}; the rounding changes {parity.changed} of the drafted tokens"
