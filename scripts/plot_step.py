"""Draw the timeline of one decode step, measured with the embedded target: docs/decoder-step.png.

    python scripts/plot_step.py checkpoint=DIR [out=FILE]

Medians over the steps of four prompts at batch size 1, after a warm-up: plain decoding at the top, the checkpoint's drafter
below.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, cast
from unittest.mock import patch

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from drafttrain.cli.quiet import quiet
from drafttrain.core.sampling import Sampling
from drafttrain.data.prompts import load_prompts
from drafttrain.decoding import step as decode_steps
from drafttrain.decoding.scheduler import Decoder, Session
from drafttrain.drafters.checkpoint import load_checkpoint
from drafttrain.measure.cases import alternate_categories, encode_cases
from drafttrain.measure.plots import COLOURS
from drafttrain.model.drafter import Drafter, DraftState
from drafttrain.model.kv_cache import KVCache
from drafttrain.model.target import Target
from drafttrain.targets import TargetOptions
from drafttrain.targets.load import LoadedTarget, load_target

PARTS = ("propose", "target", "accept", "keep", "commit", "observe", "record")


class Timed:
    """Another object, some of whose methods are timed."""

    def __init__(self, of: Any, methods: dict[str, Callable[..., Any]]) -> None:
        self._of, self._methods = of, methods

    def __getattr__(self, name: str) -> Any:
        return self._methods.get(name) or getattr(self._of, name)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self._methods["__call__"](*inputs, **named)


class Clock:
    """Wraps a session's parts and keeps one list of (part, start, end) per step, in seconds from the step's beginning."""

    def __init__(self, session: Session) -> None:
        self.session, self.began = session, 0.0
        self.steps: list[tuple[list[tuple[str, float, float]], float]] = []
        self.spans: list[tuple[str, float, float]] = []
        step = session.decode_step
        if step.state is not None:
            own = {name: self._timed(getattr(step.state, name), name) for name in ("propose", "observe")}
            step.state = cast(DraftState, Timed(step.state, own))
        step.target = cast(Target, Timed(step.target, {"__call__": self._timed(step.target, "target")}))
        step.kv = cast(KVCache, Timed(step.kv, {"keep": self._timed(step.kv.keep, "keep")}))
        step.policy = replace(step.policy, accept=self._timed(step.policy.accept, "accept"))
        session._record = self._timed(session._record, "record")  # type: ignore[method-assign]

    def _timed(self, original: Any, part: str) -> Callable[..., Any]:
        def timed(*inputs: Any, **named: Any) -> Any:
            start = perf_counter()
            result = original(*inputs, **named)
            self.spans.append((part, start - self.began, perf_counter() - self.began))
            return result

        return timed

    def step(self) -> None:
        """One step of the session. The function of its module that lays out the accepted path is timed meanwhile."""
        self.spans, self.began = [], perf_counter()
        with patch.object(decode_steps, "commit_of", self._timed(decode_steps.commit_of, "commit")):
            self.session.step()
        self.steps.append((self.spans, perf_counter() - self.began))


def timeline(loaded: LoadedTarget, drafter: Drafter | None) -> tuple[list[tuple[str, float, float]], float]:
    """Median start and end of each part, and of the whole step, in milliseconds."""
    cases, _ = encode_cases(load_prompts("embedded", None), loaded.tokenizer, 512)
    steps: list[Any] = []
    for case in alternate_categories(cases)[:4]:
        decoder = Decoder(loaded.target, drafter, "greedy", Sampling(), max_new_tokens=96)
        request = decoder.request(case.tokens)
        session = Session(decoder, 1, decoder.positions(request))
        session.submit(request)
        session.step()
        clock = Clock(session)
        while session.busy:
            clock.step()
        steps += clock.steps[3:]
    whole = [spans for spans, _ in steps if len(spans) == max(len(s) for s, _ in steps)]
    middle = [
        (whole[0][i][0], 1e3 * median(s[i][1] for s in whole), 1e3 * median(s[i][2] for s in whole))
        for i in range(len(whole[0]))
    ]
    return middle, 1e3 * median(total for _, total in steps)


def main() -> None:
    quiet()
    given = dict(word.partition("=")[::2] for word in sys.argv[1:])
    if "checkpoint" not in given or not set(given) <= {"checkpoint", "out"}:
        raise SystemExit("usage: python scripts/plot_step.py checkpoint=DIR [out=FILE]")
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
