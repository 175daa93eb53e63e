"""`drafttrain tune checkpoint=DIR`: finds the fastest draft length or tree on this machine, and stores it with the checkpoint.

Half of the prompts serve to choose. The other half decides whether the choice is faster than the trained settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from drafttrain.core.errors import UserError, check_at_least
from drafttrain.core.files import atomic_write_json, new_directory
from drafttrain.decoding.decoder import Decoded
from drafttrain.drafters.checkpoint import load_checkpoint, read_meta
from drafttrain.drafters.tuned_settings import TUNED, keep_tuned
from drafttrain.measure import MeasureOptions, TuneOptions, cells
from drafttrain.measure.acceptance import pooled
from drafttrain.measure.bench import Bench
from drafttrain.measure.cases import Case, encode_cases, left_out_notes, waves
from drafttrain.measure.decoding import decoder_of
from drafttrain.measure.expected import forced_hits
from drafttrain.measure.plan import Budget
from drafttrain.measure.plots import tuning_plot
from drafttrain.measure.report import rounded
from drafttrain.measure.speed import Contender, throughput, tpot
from drafttrain.measure.tuning import OBJECTIVES, Predicted, ProposalShape, shapes_of, surface, temperatures
from drafttrain.model.drafter import Drafter
from drafttrain.runs.checkpoint_source import CheckpointSource
from drafttrain.runs.console import line_printer, print_line, print_note
from drafttrain.runs.data import measurement_prompts
from drafttrain.runs.environment import environment
from drafttrain.runs.lock_step import shared_target
from drafttrain.runs.options import RunOptions
from drafttrain.runs.paths import dated_path
from drafttrain.runs.progress import progress_bars
from drafttrain.targets.load import load_target

DEFAULT = "as trained"
Settings = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tuner:
    """Times decode settings of one drafter."""

    bench: Bench
    drafter: Drafter
    options: TuneOptions
    trained: Settings  # the checkpoint's decode settings

    def use(self, settings: Settings) -> None:
        self.drafter.use_decode_settings(self.trained | settings)

    def race(self, name: str, settings: dict[str, Settings], cases: Sequence[Case], seconds: float) -> dict[str, float]:
        """The speed of each of the settings / that of the first, by name: medians over the repeats, on the same prompts."""
        wanted = waves(len(cases), self.options.batch_size)
        contenders = {label: self._contender(own, cases) for label, own in settings.items()}
        laps = self.bench.timed(name, contenders, wanted, self.options.repeats, seconds, {})
        first = next(iter(settings))
        rates = {label: [self._rate(lap) for lap in own] for label, own in laps.items()}
        return dict(
            self.bench.part.share(
                {label: median(a / b for a, b in zip(own, rates[first], strict=True)) for label, own in rates.items()}
            )
        )

    def _rate(self, lap: list[Decoded]) -> float:
        found = throughput(lap) if self.options.objective == "throughput" else 1.0 / (tpot(lap) or float("inf"))
        return found or 0.0

    def _contender(self, settings: Settings, cases: Sequence[Case]) -> Contender:
        """A separate decoder for these settings, because a session keeps the proposal that it began with."""
        self.use(settings)
        decoder = decoder_of(self.bench.loaded, self.bench.decode, self.drafter)

        def run(wave: list[int]) -> Decoded:
            self.use(settings)
            return decoder.run([cases[i].tokens for i in wave], len(wave), first_request=wave[0])

        return run


def tune(options: RunOptions, resolved: dict[str, Any]) -> Path:
    """Search, time, and store the fastest settings; returns the folder of the results, `<output>/tune/<time>/`.

    Raises UserError for bad options, and as `measure` does.
    """
    _check(options)
    source, console = CheckpointSource.of(str(options.checkpoint)), Console()
    folder = dated_path(options.output, "tune")
    prompts = measurement_prompts(options)
    with shared_target(options, "tune") as part:
        loaded = load_target(source.target(options.target), part)
        directory = source.checkpoint(loaded, line_printer(console))
        record, restored = read_meta(directory), load_checkpoint(directory, loaded)
        room = loaded.target.shape.max_positions - options.decode.max_new_tokens
        cases, left_out = encode_cases(prompts, loaded.tokenizer, room, loaded.images)
        for note in left_out_notes(left_out, len(prompts), room):
            print_note(console, note)
        _check_prompts(len(cases), options.tune.batch_size)
        with progress_bars(console) as watch:
            measure = MeasureOptions(minutes=options.tune.minutes, repeats=options.tune.repeats)
            bench = Bench(restored.loaded, options.decode, measure, Budget(60 * options.tune.minutes), watch)
            found = _search(Tuner(bench, restored.drafter.requires_grad_(False), options.tune, record.decode), cases)
        found |= {"checkpoint": str(directory), "prompts": len(cases), "environment": environment(loaded.target.device)}
        found |= {"batch_size": options.tune.batch_size, "objective": options.tune.objective, "decode": asdict(options.decode)}
        if part.first:
            folder = new_directory(folder, partial(_write, found))
            _print_finalists(found, console)
            _write_choice(directory, found, options.tune.write, console)
            print_line(console, f"surface: {folder / 'surface.png'}")
    return folder


def _write(found: dict[str, Any], folder: Path) -> None:
    tuning_plot(found["surface"], found["chosen"], folder / "surface.png")
    atomic_write_json(folder / "tune.json", rounded(found))


def _search(tuner: Tuner, cases: list[Case]) -> dict[str, Any]:
    """The finalists with their predicted and measured speed, all predictions, and the choice."""
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


def _predicted(tuner: Tuner, cases: Sequence[Case]) -> tuple[list[Predicted], list[ProposalShape]]:
    """(all predictions, the best proposals). For untrained drafters: no predictions, and all possible proposals."""
    bench, drafter = tuner.bench, tuner.drafter
    target, part = bench.loaded.target, bench.part
    if not drafter.trained:
        return [], shapes_of(drafter, [], target.trees)
    plain = bench.decode_all("plain decoding", None, cases, passes=2)
    outputs = [r.tokens for r in plain]
    hits = forced_hits(target, drafter, [c.tokens for c in cases[: len(plain)]], outputs, target.device)
    sampled = not bench.sampling.greedy and drafter.samples
    found = surface(target, drafter, hits, sampled, tuner.options.batch_size)
    if not found:
        raise UserError("the outputs are too short to predict acceptance; raise decode.max_new_tokens, or give more prompts")
    order = part.share([[p.shape.depth, p.shape.nodes] for p in found])  # by the first process's clock
    found.sort(key=lambda p: order.index([p.shape.depth, p.shape.nodes]))
    return found, [p.shape for p in found[: tuner.options.finalists]]


def _temperature(tuner: Tuner, settings: Settings, cases: Sequence[Case]) -> Settings:
    """The draft temperature of the highest tau, for drafters that sample; empty if it is the target's temperature."""
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
    title = (
        f"batch {found['batch_size']}, {found['objective']}: speed compared with {DEFAULT}, on the first half of the prompts"
    )
    columns = ("proposal", "expected tau", "predicted speedup over plain", "measured")
    table = cells.console_table(title, columns, left=("proposal",))
    for row in found["finalists"]:
        bold = "bold" if row["name"] == found["chosen"]["name"] else ""
        speeds = ("-" if speed is None else f"{speed:.2f}x" for speed in (row["predicted_speedup"], row["raced"]))
        table.add_row(row["name"], cells.number(row["expected_tau"]), *speeds, style=bold)
    console.print(table)


def _write_choice(directory: Path, found: dict[str, Any], write: bool, console: Console) -> None:
    """Print the choice, and write it if it is faster."""
    chosen = found["chosen"]
    name = chosen["name"]
    if "draft_temperature" in chosen["settings"]:
        name += f", draft temperature {chosen['settings']['draft_temperature']:g}"
    if not chosen["better"]:
        effect = f"{directory / TUNED} stays" if (directory / TUNED).is_file() else "nothing is written"
        result = "nothing was faster" if not chosen["settings"] else f"{name} is not faster on the other prompts"
        print_line(console, f"{result} ({chosen['over_default']:.2f}x): {effect}")
        return
    print_line(console, f"{name}: {chosen['over_default']:.2f}x the speed of {DEFAULT} on the other prompts")
    if write:
        about = {key: found[key] for key in ("batch_size", "objective", "prompts", "environment", "decode")}
        file = keep_tuned(directory, chosen["settings"], rounded(about | {"over_default": chosen["over_default"]}))
        print_line(console, f"stored in {file}; delete it to decode {DEFAULT} again")


def _check(options: RunOptions) -> None:
    tune_options, decode = options.tune, options.decode
    if options.checkpoint is None:
        raise UserError("checkpoint is not set; name a step-NNNNN directory of a run with checkpoint=DIR")
    if tune_options.objective not in OBJECTIVES:
        raise UserError(f"tune.objective is {tune_options.objective!r}; choose {' or '.join(OBJECTIVES)}")
    check_at_least(1, "tune", tune_options, "batch_size", "repeats", "finalists")
    if tune_options.minutes <= 0:
        raise UserError(f"tune.minutes is {tune_options.minutes:g}; give more than 0")
    set_by_hand = [name for name in ("draft_length", "window", "fallback") if getattr(decode, name) not in (None, False)]
    if set_by_hand:
        raise UserError(f"decode.{set_by_hand[0]} is set, but tune chooses it or tests without it; leave it out")


def _check_prompts(count: int, batch: int) -> None:
    if count // 2 < batch:
        raise UserError(
            f"half of the {count} prompts, {count // 2}, are fewer than a batch of {batch}; give prompts=FILE with more, or "
            "lower tune.batch_size"
        )
