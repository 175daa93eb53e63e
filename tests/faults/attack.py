"""Shared by the attacks: the commands that they try, in a child with little time for templates, and the verdict."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from tests.faults.campaign import REFUSED, UNCHANGED, TryResult, broken, failed
from tests.faults.child import Ended, forked
from tests.faults.composed import cli
from tests.faults.material import MEASURING

LATE = 60.0  # seconds of processor time that a command may take
SECONDS, SIZE = 2.0, 256 << 20  # limits of a template here, so that a try is short
MARKER = "marker-of-foreign-code"  # a file that hostile code would make
CONTROLS = "\x1b\x07\x9b\x08"
TARGET = ("target=hf", "target.path=target")
PROMPTS = "prompts=prompts.jsonl"
INSPECT = ("inspect", *TARGET, "out=page.html")
GENERATE = ("generate", *TARGET, "prompt=hello", "decode.max_new_tokens=4")
MEASURE = ("measure", *TARGET, PROMPTS, *MEASURING)
OURS = "checkpoint=medusa/step-00006"
PREPARE = ("prepare", *TARGET, "data.path=prompts.jsonl", "out=own", "prepare.max_new_tokens=4", "prepare.max_length=300")
Attack = Callable[[random.Random, Path], TryResult]
Line = tuple[str, ...]


def command(draw: random.Random) -> Line:
    """A command that reads a target."""
    return draw.choice([(*INSPECT, "data.path=data.jsonl"), GENERATE, (*MEASURE, OURS, "output=result"), PREPARE])


def run(arguments: Line, folder: Path) -> Ended:
    """Run it in a child whose templates have less time and memory."""
    work = cli(arguments)

    def bounded() -> int:
        from drafttrain.data import templates

        templates.SECONDS, templates.SIZE = SECONDS, SIZE
        return work()

    return forked(bounded, folder, folder.parent / "said").wait(LATE)


def judged(what: str, shown: str, ended: Ended, folder: Path, refuse: bool = False) -> TryResult:
    """The verdict: no foreign code ran, and the command ended in one line or as if undisturbed. refuse: it must refuse the
    input.
    """
    expected = "one line and exit code 2" if refuse else "one line and exit code 2, or no harm"
    fault = broken(ended)
    if made := [path for path in (folder, folder.parent) if (path / MARKER).exists()]:
        fault = f"foreign code has run: {made[0] / MARKER}"
        (made[0] / MARKER).unlink()
    # what `generate` writes is the model's text as it is
    said = ended.err if what.endswith(", generate") else ended.out + ended.err
    if fault is None and (control := next((c for c in CONTROLS if c in said), None)):
        fault = f"the output has {control!r} in it"
    if fault is None and ended.code and ended.line is None:
        fault = f"exit code {ended.code} without one line"
    if fault is None and refuse and ended.code == 0:
        fault = "it is not refused"
    if fault is not None:
        return failed(what, expected, fault, shown, ended)
    return TryResult(what, REFUSED if ended.code else UNCHANGED, command=shown)
