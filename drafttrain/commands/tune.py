"""`drafttrain tune checkpoint=DIR`: the draft length or tree that is fastest here, kept with the checkpoint.

Half of the prompts choose, the other half decides whether the choice is faster than what was trained.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from drafttrain.core.errors import UserError
from drafttrain.core.files import atomic_write_json
from drafttrain.data.prompts import load_prompts
from drafttrain.decoding.decoder import Decoded
from drafttrain.drafters.checkpoint import TUNED, keep_tuned, load_checkpoint, read_meta
from drafttrain.measure import MeasureOptions, TuneOptions
from drafttrain.measure.acceptance import pooled
from drafttrain.measure.bench import Bench
from drafttrain.measure.cases import Case, encode_cases, waves
from drafttrain.measure.decoding import decoder_of
from drafttrain.measure.expected import forced_hits
from drafttrain.measure.plan import Budget, plan
from drafttrain.measure.plots import tuning_plot
from drafttrain.measure.report import rounded
from drafttrain.measure.speed import Contender, race, throughput, tpot
from drafttrain.measure.tuning import OBJECTIVES, Predicted, Shape, shapes_of, surface, temperatures
from drafttrain.model.drafter import Drafter
from drafttrain.runs.checkpoint_source import CheckpointSource, plain_printer
from drafttrain.runs.environment import environment
from drafttrain.runs.lock_step import shared_target
from drafttrain.runs.options import RunOptions
from drafttrain.runs.progress import progress_bars
from drafttrain.targets.load import load_target

DEFAULT = "as trained"
Settings = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tuner:
    """What every race shares. trained: the checkpoint's own decode settings."""

    bench: Bench
    drafter: Drafter
    asked: TuneOptions
    trained: Settings

    def use(self, settings: Settings) -> None:
        self.drafter.use_decode_settings(self.trained | settings)
        self.drafter.prefer(settings)

    def race(self, name: str, settings: dict[str, Settings], cases: Sequence[Case], seconds: float) -> dict[str, float]:
        """Speed of each over that of the first, by name: medians over repeats, all in turn over the same prompts."""
        wanted = waves(len(cases), self.asked.batch_size)
        contenders = {label: self._contender(own, cases) for label, own in settings.items()}
        began = time.monotonic()
        race(contenders, wanted[:1], 1)  # warms up, and tells what a round takes
        share = self.bench.part.share
        chosen = share(plan(time.monotonic() - began, seconds, len(wanted), self.asked.repeats))
        done, total = 0, chosen.waves * chosen.repeats * len(contenders)

        def tick(lap: Decoded) -> None:
            nonlocal done
            done += 1
            self.bench.watch(name, done, total, sum(len(r.tokens) for r in lap.results))

        laps = race(contenders, wanted[: chosen.waves], chosen.repeats, tick=tick)
        first = next(iter(settings))
        rates = {label: [self._rate(lap) for lap in own] for label, own in laps.items()}
        return dict(
            share({label: median(a / b for a, b in zip(own, rates[first], strict=True)) for label, own in rates.items()})
        )

    def _rate(self, lap: list[Decoded]) -> float:
        found = throughput(lap) if self.asked.objective == "throughput" else 1.0 / (tpot(lap) or float("inf"))
        return found or 0.0

    def _contender(self, settings: Settings, cases: Sequence[Case]) -> Contender:
        """A decoder of its own, whose session keeps the proposal that it began with."""
        self.use(settings)
        decoder = decoder_of(self.bench.loaded, self.bench.decode, self.drafter)

        def run(wave: list[int]) -> Decoded:
            self.use(settings)
            return decoder.run([cases[i].tokens for i in wave], len(wave), first_request=wave[0])

        return run


def tune(options: RunOptions, resolved: dict[str, Any]) -> Path:
    """Returns the folder of tune.json and surface.png, `<output>/tune/<time>/`.

    Raises UserError for bad options, and as `measure` does.
    """
    _check(options)
    source, console = CheckpointSource.of(str(options.checkpoint)), Console()
    folder = Path(options.output) / "tune" / time.strftime("%Y-%m-%d_%H-%M-%S")
    prompts = load_prompts(options.prompts or options.measure.prompts, options.measure.limit)
    with shared_target(options, "tune") as part:
        loaded = load_target(source.target(options.target), part)
        directory = source.checkpoint(loaded, plain_printer(console))
        record, restored = read_meta(directory), load_checkpoint(directory, loaded)
        room = loaded.target.shape.max_positions - options.decode.max_new_tokens
        cases, _ = encode_cases(prompts, loaded.tokenizer, room)
        _check_prompts(len(cases), options.tune.batch_size)
        with progress_bars(console) as watch:
            measure = MeasureOptions(minutes=options.tune.minutes, repeats=options.tune.repeats)
            bench = Bench(restored.loaded, options.decode, measure, Budget(60 * options.tune.minutes), watch)
            found = _search(Tuner(bench, restored.drafter.requires_grad_(False), options.tune, record.decode), cases)
        found |= {"checkpoint": str(directory), "prompts": len(cases), "environment": environment(loaded.target.device)}
        found |= {"batch_size": options.tune.batch_size, "objective": options.tune.objective, "decode": asdict(options.decode)}
        if part.first:
            folder.mkdir(parents=True, exist_ok=True)
            tuning_plot(found["surface"], found["chosen"], folder / "surface.png")
            atomic_write_json(folder / "tune.json", rounded(found))
            _print_finalists(found, console)
            _write_choice(directory, found, options.tune.write, console)
            console.print(f"surface: {folder / 'surface.png'}", highlight=False, soft_wrap=True)
    return folder


def _search(tuner: Tuner, cases: list[Case]) -> dict[str, Any]:
    """The default, the finalists and the choice, with what each was predicted and measured."""
    choosing, deciding = cases[0::2], cases[1::2]
    tuner.use({})
    predicted, shapes = _predicted(tuner, choosing)
    finalists: dict[str, Settings] = {DEFAULT: {}} | {str(shape): shape.settings for shape in shapes}
    budget = tuner.bench.budget
    raced = tuner.race("race of the finalists", finalists, choosing, budget.left / 2)
    name = max(raced, key=lambda label: raced[label])
    settings = finalists[name]
    drawn = _temperature(tuner, settings, choosing)
    settings = settings | drawn
    gained = 1.0
    if settings:
        last = tuner.race("on the other prompts", {DEFAULT: {}, "chosen": settings}, deciding, budget.left)
        gained = last["chosen"]
    better = gained > 1.0
    rows = [
        {"name": label, "settings": own, "raced": raced[label], **_forecast(label, predicted)}
        for label, own in finalists.items()
    ]
    return {
        "finalists": rows,
        "surface": [{"depth": p.shape.depth, "nodes": p.shape.nodes, "tau": p.tau, "speedup": p.speedup} for p in predicted],
        "chosen": {"name": name, "settings": settings, "over_default": gained, "better": better},
    }


def _predicted(tuner: Tuner, cases: Sequence[Case]) -> tuple[list[Predicted], list[Shape]]:
    """The surface and its best shapes; without a prediction, for drafters that train nothing, all shapes there are."""
    bench, drafter = tuner.bench, tuner.drafter
    target, part = bench.loaded.target, bench.part
    if not drafter.trained:
        return [], shapes_of(drafter, [], target.trees)
    plain = bench.decode_all("plain decoding", None, cases, passes=2)
    outputs = [r.tokens for r in plain]
    hits = forced_hits(target, drafter, [c.tokens for c in cases[: len(plain)]], outputs, target.device)
    sampled = not bench.sampling.greedy and drafter.samples
    found = surface(target, drafter, hits, sampled, tuner.asked.batch_size)
    if not found:
        raise UserError("the outputs are too short to say what is accepted; raise decode.max_new_tokens, or give more prompts")
    order = part.share([[p.shape.depth, p.shape.nodes] for p in found])  # by the first process's clock
    found.sort(key=lambda p: order.index([p.shape.depth, p.shape.nodes]))
    return found, [p.shape for p in found[: tuner.asked.finalists]]


def _temperature(tuner: Tuner, settings: Settings, cases: Sequence[Case]) -> Settings:
    """The draft temperature at which most is accepted, for drafters that sample; nothing where it is the target's."""
    sampling = tuner.bench.sampling
    if sampling.greedy or not tuner.drafter.samples or sampling.draft_temperature is not None:
        return {}
    taus = {}
    for drawn in temperatures(sampling.temperature):
        own = settings | {"draft_temperature": drawn, "temperature": sampling.temperature}
        tuner.use(own)
        results = tuner.bench.decode_all(f"draft temperature {drawn:g}", tuner.drafter, cases)
        taus[drawn] = pooled(results).tau or 0.0
    best = max(taus, key=lambda drawn: taus[drawn])
    return {} if best == sampling.temperature else {"draft_temperature": best, "temperature": sampling.temperature}


def _forecast(label: str, predicted: Sequence[Predicted]) -> dict[str, float | None]:
    own = next((p for p in predicted if str(p.shape) == label), None)
    return {"expected_tau": None if own is None else own.tau, "predicted_speedup": None if own is None else own.speedup}


def _print_finalists(found: dict[str, Any], console: Console) -> None:
    title = f"batch {found['batch_size']}, {found['objective']}: speed over {DEFAULT}, on the prompts that choose"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("proposal", "expected tau", "predicted speedup over plain", "raced"):
        table.add_column(column, justify="left" if column == "proposal" else "right")
    number: Callable[[float | None, str], str] = lambda value, unit: "-" if value is None else f"{value:.2f}{unit}"  # noqa: E731
    for row in found["finalists"]:
        bold = "bold" if row["name"] == found["chosen"]["name"] else ""
        cells = (number(row["expected_tau"], ""), number(row["predicted_speedup"], "x"), number(row["raced"], "x"))
        table.add_row(row["name"], *cells, style=bold)
    console.print(table)


def _write_choice(directory: Path, found: dict[str, Any], write: bool, console: Console) -> None:
    """Say what was decided, and write it."""
    chosen = found["chosen"]
    said = chosen["name"]
    if "draft_temperature" in chosen["settings"]:
        said += f", draft temperature {chosen['settings']['draft_temperature']:g}"
    if not chosen["better"]:
        kept = f"{directory / TUNED} stays" if (directory / TUNED).is_file() else "nothing is written"
        told = "nothing was faster" if not chosen["settings"] else f"{said} is not faster on the other prompts"
        console.print(f"{told} ({chosen['over_default']:.2f}x): {kept}", highlight=False, soft_wrap=True)
        return
    console.print(f"{said}: {chosen['over_default']:.2f}x the speed of {DEFAULT} on the other prompts", highlight=False)
    if write:
        about = {key: found[key] for key in ("batch_size", "objective", "prompts", "environment", "decode")}
        file = keep_tuned(directory, chosen["settings"], rounded(about | {"over_default": chosen["over_default"]}))
        console.print(f"kept in {file}; delete it to decode {DEFAULT} again", highlight=False, soft_wrap=True)


def _check(options: RunOptions) -> None:
    asked, decode = options.tune, options.decode
    if options.checkpoint is None:
        raise UserError("checkpoint is not set; name a step-NNNNN directory of a run with checkpoint=DIR")
    if asked.objective not in OBJECTIVES:
        raise UserError(f"tune.objective is {asked.objective!r}; choose {' or '.join(OBJECTIVES)}")
    for name in ("batch_size", "repeats", "finalists"):
        if getattr(asked, name) < 1:
            raise UserError(f"tune.{name} is {getattr(asked, name)}; set it to 1 or more")
    if asked.minutes <= 0:
        raise UserError(f"tune.minutes is {asked.minutes:g}; give more than 0")
    set_by_hand = [name for name in ("draft_length", "window", "fallback") if getattr(decode, name) not in (None, False)]
    if set_by_hand:
        raise UserError(f"decode.{set_by_hand[0]} is set, which tune is to choose or to judge without; leave it out")


def _check_prompts(count: int, batch: int) -> None:
    if count // 2 < batch:
        raise UserError(
            f"{count} prompts leave {count // 2} to choose on and as many to decide, a batch has {batch}; give prompts=FILE "
            "with more, or lower tune.batch_size"
        )
