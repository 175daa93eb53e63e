"""README.md of an exported directory: what it drafts for, what it was trained on, what it was worth, how to serve it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from drafttrain import __version__
from drafttrain.export import serve
from drafttrain.export.files import Source
from drafttrain.export.hub import Repository, is_repository
from drafttrain.export.parity import Parity

TAGS = ["speculative-decoding", "drafttrain"]
FROZEN = "It drafts tokens for this target and no other, which verifies them: the target's output stays its own."
ADAPTED = "The target was trained with it, and lies beside it, merged: serve that one. Its output is not the original's."
APART = (
    "The target was trained with it. What was trained lies beside it, as a peft adapter: merge it into the target, and serve "
    "what comes out. Its output is not the original's."
)
MERGE = (
    "from peft import AutoPeftModelForCausalLM\n"
    'AutoPeftModelForCausalLM.from_pretrained("{adapter}").merge_and_unload().save_pretrained("{merged}")'
)
OWN_MODULE = ("official", "transformers")  # what is typed there is Python


@dataclass(frozen=True, slots=True)
class Measured:
    """From the run's report.json. Each None where it was not measured."""

    tau: float | None = None
    speedup: float | None = None
    policy: str | None = None
    device: str | None = None
    data: str | None = None
    steps: int | None = None

    @staticmethod
    def of(checkpoint: Path) -> Measured:
        """Nothing where the run has no report, or none of this checkpoint."""
        try:
            report = json.loads((checkpoint.resolve().parent.parent / "report.json").read_text(encoding="utf-8"))
            entry: dict[str, Any] = next((c for c in report["checkpoints"] if c["name"] == checkpoint.resolve().name), {})
            training = report["training"] or {}
            return Measured(
                entry.get("tau"),
                entry.get("speedup"),
                entry.get("policy"),
                report["environment"].get("device"),
                (training.get("data") or {}).get("path"),
                training.get("steps"),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return Measured()


def card(source: Source, layout: str, place: str | Repository, parity: Parity) -> str:
    """place: the directory where the export will lie, or the repository that it goes to."""
    meta, measured = source.opened.meta, Measured.of(source.opened.directory)
    base = {"base_model": source.target_name} if is_repository(source.target_name) else {}  # the hub takes no directories
    head = yaml.safe_dump(base | {"tags": TAGS}, sort_keys=False)
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
    kind = "python" if source.stack in OWN_MODULE else "bash"
    files = isinstance(place, Repository) and (source.stack not in serve.BY_NAME or source.merged is not None)
    directory = place if isinstance(place, str) else place.folder if files else place.name
    parts = [
        f"---\n{head}---",
        f"# {meta.family} drafter for {source.target_name}",
        _about_target(source),
        f"| | |\n|---|---|\n{table}",
        *(
            [f"Its files are read from a directory: `{place.download}` makes one."]
            if isinstance(place, Repository) and files
            else []
        ),
        f"```{kind}\n{serve.command(source, directory)}\n```",
    ]
    note = serve.note(meta.family, source.stack)
    return "\n\n".join(parts + ([note] if note else [])) + "\n"


def _about_target(source: Source) -> str:
    if source.adapter is None:
        return ADAPTED if source.merged else FROZEN
    return f"{APART}\n\n```python\n{MERGE.format(adapter=source.adapter, merged=source.merged)}\n```"


def _trained(source: Source, measured: Measured) -> str:
    meta = source.opened.meta
    if meta.imported is not None:
        return f"by others: `{meta.imported['from']}` ({meta.imported['layout']}, {meta.imported['dtype']})"
    return f"{meta.step} steps" + (f" on `{measured.data}`" if measured.data else "")


def _measured(measured: Measured) -> str:
    if measured.tau is None:
        return "not in a report of its run"
    speed = "" if measured.speedup is None else f", {measured.speedup:.2f}x the speed of plain decoding"
    where = "" if measured.device is None else f" on {measured.device}"
    return f"tau {measured.tau:.2f} tokens a verification (policy {measured.policy}){speed}, in drafttrain's own decoder{where}"


def _parity(source: Source, parity: Parity) -> str:
    text = f"read back from these files, {parity.drafts} golden drafts and their logits are the checkpoint's"
    if source.dtype == "float32":
        return text
    return f"{text} with weights rounded to {source.dtype}, which makes {parity.changed} of them other tokens than float32 does"
