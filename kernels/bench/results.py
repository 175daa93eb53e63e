"""What is known of a machine, case by case: one JSON file a GPU, written after every case, so that a run can go on from it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from drafttrain.atomic import atomic_write_json
from kernels.bench.machine import Machine

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "kernels" / "bench" / "results"
OPERATORS = ("kernels/csrc/**/*", "kernels/include/**/*", "kernels/triton/*.py", "drafttrain/ops/*.py")
DECODER = (*OPERATORS, "drafttrain/*.py", "drafttrain/targets/*.py", "drafttrain/drafters/*.py")
SOURCES = {
    "operators": OPERATORS,
    "decoder": DECODER,
    "training": (*DECODER, "drafttrain/features/*.py", "drafttrain/train/flops.py", "drafttrain/train/peaks.py"),
}
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclass(frozen=True, slots=True)
class Entry:
    """How a case ended. figures: by name, plain numbers. note: why it failed or was skipped."""

    status: str
    figures: dict[str, Any] = field(default_factory=dict)
    note: str = ""


@cache
def sources(scope: str) -> str:
    """A name for the contents of the files that a case of this scope depends on."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in SOURCES[scope] for path in ROOT.glob(pattern) if path.is_file()):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


class Results:
    """folder None: nothing is read or written. A rehearsal's file is named so, and holds no figures."""

    def __init__(self, folder: Path | None, machine: Machine) -> None:
        self.machine = machine
        self.path = None if folder is None else folder / f"{machine.slug}.json"
        self.known: dict[str, Any] = {}
        if self.path is not None and self.path.exists():
            self.known = json.loads(self.path.read_text(encoding="utf-8"))

    def of(self, section: str, name: str, scope: str) -> Entry | None:
        """How the case ended with these sources and this torch, if it was run."""
        found = self.known.get(section, {}).get(name)
        if found is None or found["sources"] != sources(scope) or found["torch"] != self.machine.facts["torch"]:
            return None
        return Entry(found["status"], found["figures"], found["note"])

    def put(self, section: str, name: str, scope: str, entry: Entry) -> None:
        figures = {} if self.machine.rehearsal else entry.figures
        record = {"status": entry.status, "figures": figures, "note": entry.note}
        record |= {"sources": sources(scope), "torch": self.machine.facts["torch"]}
        self.known["machine"] = self.machine.facts | {"name": self.machine.name}
        self.known.setdefault(section, {})[name] = record
        if self.path is not None:
            atomic_write_json(self.path, self.known)
