"""Draw the timeline of one decode step, measured on the embedded target: docs/decoder-step.png.

    python scripts/plot_step.py checkpoint=DIR [out=FILE]

Medians over the steps of four prompts, batch size 1, after a warm-up: plain decoding above, the checkpoint's drafter below.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from drafttrain import speculate
from drafttrain.checkpoint import load_checkpoint
from drafttrain.commands.quiet import quiet
from drafttrain.data.prompts import load_prompts
from drafttrain.drafter import Drafter
from drafttrain.measure.cases import encode_cases, spread
from drafttrain.measure.plots import COLOURS
from drafttrain.sampling import Sampling
from drafttrain.speculate import Decoder, Session
from drafttrain.targets import TargetOptions
from drafttrain.targets.load import LoadedTarget, load_target

PARTS = ("propose", "target", "verify", "keep", "commit", "observe", "record")


class Clock:
    """Wraps a session's parts; one list of (part, start, end) per step, in seconds from the step's beginning."""

    def __init__(self, session: Session) -> None:
        self.session, self.steps, self.spans = session, [], []
        decoder = session.decoder
        self.began = 0.0
        if decoder.drafter is not None:
            session_drafter: Any = decoder.drafter
            self._wrap(session_drafter, "propose", "propose")
            self._wrap(session_drafter, "observe", "observe")
        self._wrap(decoder, "target", "target")
        self._wrap(session.kv, "keep", "keep")
        self._wrap(session, "_record", "record")
        self._wrap(speculate, "commit_of", "commit")
        policy = decoder.policy
        timed = self._timed(policy.verify, "verify")
        decoder.policy = type(policy)(policy.name, policy.lossless, timed)

    def _timed(self, original: Any, part: str) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = perf_counter()
            result = original(*args, **kwargs)
            self.spans.append((part, start - self.began, perf_counter() - self.began))
            return result

        return timed

    def _wrap(self, owner: Any, name: str, part: str) -> None:
        original = getattr(owner, name)
        timed = self._timed(original, part)
        if name == "target":  # a module: its attributes are asked for too
            timed = type("Timed", (), {"__call__": staticmethod(timed), "__getattr__": lambda _, key: getattr(original, key)})()
        object.__setattr__(owner, name, timed) if owner is not speculate else setattr(owner, name, timed)

    def step(self) -> None:
        self.spans, self.began = [], perf_counter()
        self.session.step()
        self.steps.append((self.spans, perf_counter() - self.began))


def timeline(loaded: LoadedTarget, drafter: Drafter | None) -> tuple[list[tuple[str, float, float]], float]:
    """Median start and end of each part, and of the whole step, in milliseconds."""
    cases, _ = encode_cases(load_prompts("embedded", None), loaded.tokenizer, 512)
    steps: list[Any] = []
    original = speculate.commit_of
    for case in spread(cases)[:4]:
        decoder = Decoder(loaded.target, drafter, "greedy", Sampling(), max_new_tokens=96)
        request = decoder.request(case.tokens)
        session = Session(decoder, 1, decoder.positions(request))
        session.submit(request)
        session.step()
        clock = Clock(session)
        while session.busy:
            clock.step()
        steps += clock.steps[3:]
        speculate.commit_of = original
        if drafter is not None:
            del drafter.__dict__["propose"], drafter.__dict__["observe"]
    whole = [spans for spans, _ in steps if len(spans) == max(len(s) for s, _ in steps)]
    middle = [
        (whole[0][i][0], 1e3 * median(s[i][1] for s in whole), 1e3 * median(s[i][2] for s in whole))
        for i in range(len(whole[0]))
    ]
    return middle, 1e3 * median(total for _, total in steps)


def main() -> None:
    quiet()
    given = dict(word.split("=", 1) for word in sys.argv[1:])
    torch.manual_seed(0)
    loaded = load_target(TargetOptions())
    restored = load_checkpoint(Path(given["checkpoint"]), loaded)
    loaded, drafter = restored.loaded, restored.drafter.requires_grad_(False)
    rows = {"plain decoding": timeline(loaded, None), "with a drafter": timeline(loaded, drafter)}
    figure = Figure(figsize=(9, 2.9), layout="constrained", dpi=150)
    axes = figure.add_subplot()
    for y, (parts, total) in enumerate(rows.values()):
        axes.barh(y, total, 0.56, color="#e3e3e3")
        for part, start, end in parts:
            axes.barh(
                y,
                end - start,
                0.56,
                left=start,
                color=COLOURS[PARTS.index(part) % len(COLOURS)] if part != "record" else "#333333",
            )
            if end - start > 0.03 * rows["with a drafter"][1]:
                axes.text(
                    (start + end) / 2, y, f"{part}\n{end - start:.2f}", ha="center", va="center", color="white", fontsize=8
                )
        axes.text(total, y, f"  {total:.2f} ms", va="center", fontsize=9)
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds since the step began")
    axes.set_xlim(0, 1.12 * max(total for _, total in rows.values()))
    axes.spines[["top", "right", "left"]].set_visible(False)
    handles = [axes.barh(0, 0, color=COLOURS[i % len(COLOURS)] if p != "record" else "#333333") for i, p in enumerate(PARTS)]
    axes.legend(handles, PARTS, ncols=len(PARTS), frameon=False, loc="upper center", bbox_to_anchor=(0.5, 1.22), fontsize=8)
    FigureCanvasAgg(figure)
    figure.savefig(given.get("out", "docs/decoder-step.png"))


if __name__ == "__main__":
    main()
