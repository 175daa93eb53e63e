"""`python -m tests.faults --minutes 30 --seed 0 --kinds kill,files,data,hostile,storm`: see docs/reliability.md."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rich.console import Console


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0, help="of the campaign; with --kind: of one try, as result.json names it")
    parser.add_argument("--kinds", default=None, help="of kill,files,data,hostile,storm; all by default")
    parser.add_argument("--kind", default=None, help="make the one try of this kind that --seed names")
    parser.add_argument("--again", type=Path, default=None, help="a result.json: make its failed tries again")
    parser.add_argument("--table", type=Path, default=None, help="a result.json: print its counts in Markdown")
    parser.add_argument("--tries", type=int, default=None, help="of each kind at most")
    parser.add_argument("--out", type=Path, default=Path("outputs/faults"))
    asked = parser.parse_args()
    _settings()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    from tests.faults import campaign
    from tests.faults.child import frozen
    from tests.faults.kinds import KINDS, load_all

    names = list(KINDS) if asked.kinds is None else asked.kinds.split(",")
    if unknown := [name for name in [*names, *filter(None, [asked.kind])] if name not in KINDS]:
        parser.error(f"unknown kind {unknown[0]}; choose of {', '.join(KINDS)}")
    if asked.table:
        print(campaign.markdown(asked.table))
        return 0
    console, out = Console(width=None if sys.stdout.isatty() else 150), asked.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    load_all()
    with frozen():
        if asked.kind or asked.again:
            wanted = [(asked.kind, asked.seed)] if asked.kind else list(campaign.again(asked.again))
            return _replay(wanted, out, console)
        counts = campaign.run([KINDS[name]() for name in names], asked.minutes, asked.seed, out, console, asked.tries)
    console.print(campaign.table(counts))
    console.print(f"seed {asked.seed}; record: {out / 'result.json'}", soft_wrap=True, highlight=False)
    return int(any(own.failures for own in counts.values()))


def _replay(wanted: list[tuple[str, int]], out: Path, console: Console) -> int:
    from tests.faults import campaign
    from tests.faults.kinds import KINDS

    ready, bad = {}, False
    for name, seed in wanted:
        if name not in ready:
            ready[name] = KINDS[name]()
            ready[name].prepare(out / name)
        for outcome in campaign.tried(ready[name], seed, out / name):
            bad |= outcome.result == campaign.FAILURE
            console.print(f"{name} {seed}: {outcome.result}: {outcome.what}", markup=False, highlight=False)
            if outcome.result == campaign.FAILURE:
                for title in ("command", "expected", "got", "out", "err"):
                    console.print(f"  {title}: {getattr(outcome, title)}", markup=False, highlight=False, soft_wrap=True)
    return int(bad)


def _settings() -> None:
    """Set the variables that libraries read at import; one thread per process, because forked children may wait forever
    otherwise.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ |= {"WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HYDRA_FULL_ERROR": "1"}
    os.environ.setdefault("TERM", "dumb")


if __name__ == "__main__":
    sys.exit(main())
