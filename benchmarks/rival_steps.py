"""An EAGLE-3 training step compared with SpecForge's and speculators' modules: forward, loss and backward on the same batch.

    python -m benchmarks.train rivals --rivals PYTHON        PYTHON: an interpreter with drafttrain and both toolkits

The case is that of `steps`: the same weights, batch and target's states for all, one thread each, processor time, interleaved.
Losses differ by constants and by positions at a row's end, so the gradients' norms are compared. PYTHON's environment is made
beside the project's, whose torch stays:

    python -m venv outputs/rivals/venv && outputs/rivals/venv/bin/pip install -e .
    outputs/rivals/venv/bin/pip install --no-deps specforge==0.2.0 speculators==0.9.0 hs-connectors==0.9.0 loguru openai \\
        python-dotenv pydantic-settings
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from benchmarks.common import WIDTH, DiffersError
from benchmarks.steps import DTYPES, Found, Settings, Side, cases

WORKER = Path(__file__).with_name("rival_worker.py")
RIVALS = ("specforge", "speculators")
STEPS = (3, 7)
CLOSE = 5e-2  # allowed difference of the gradients' norms, relative
GOAL = 2.0  # of ours, compared with the faster rival


def rivals(settings: Settings) -> Found:
    if settings.rivals is None:
        settings.say("rivals need --rivals PYTHON, an interpreter with specforge and speculators; left out")
        return Found(None, [])
    table = Table(
        "steps", "dtype", "tokens/s", *(f"{name}'s" for name in RIVALS), "times the faster", "goal", box=None, width=WIDTH
    )
    record, all_cases = [], cases(settings)
    sides = [Side(Path(sys.executable)), *(Side(settings.rivals, WORKER, name) for name in RIVALS)]
    try:
        for steps in STEPS:
            for dtype in DTYPES:
                case = all_cases["eagle3", dtype] | {"options": {"steps": steps}}
                found = raced(sides, case, settings.repeats)
                settings.say(f"{steps} steps, {dtype}: {found['times']:.2f} times the faster rival's")
                record.append({"steps": steps, "dtype": dtype, "case": case} | found)
                rates = [f"{rate:,.0f}" for rate in found["tokens_per_s"]]
                goal = f">= {GOAL:g}" if found["times"] >= GOAL else f">= {GOAL:g} MISSED"
                table.add_row(str(steps), dtype, *rates, f"{found['times']:.2f}", goal)
    finally:
        for side in sides:
            side.end()
    return Found(table, record)


def raced(sides: list[Side], case: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Tokens per processor second of ours and the rivals; times: of the faster rival's, the median of the repeats' ratios.

    Raises DiffersError where the gradients' norms differ.
    """
    first, apart = [side.ask("step", case) for side in sides], {}
    for name, other in zip(RIVALS, first[1:], strict=True):
        apart[name] = abs(other["norm"] / first[0]["norm"] - 1.0)
        if not apart[name] <= CLOSE:
            raise DiffersError(f"{case['dtype']}: the norms of {name}'s gradients and ours are {apart[name]:.1e} apart")
    seconds = [[side.ask("step", case)["seconds"] for side in sides] for _ in range(repeats)]
    columns = list(zip(*seconds, strict=True))
    return {
        "tokens_per_s": [case["rows"] * case["length"] / median(column) for column in columns],
        "times": min(median(other / own for own, other in zip(columns[0], column, strict=True)) for column in columns[1:]),
        "apart": apart,
    }
