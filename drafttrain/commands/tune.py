"""`drafttrain tune checkpoint=DIR`: finds the fastest draft length or tree on this machine, and stores it with the checkpoint.

Half of the prompts serve to choose. The other half decides whether the choice is faster than the trained settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from drafttrain.core.console import line_printer, print_line, print_note, stages
from drafttrain.core.errors import UserError
from drafttrain.core.files import atomic_write_json, new_directory
from drafttrain.data.chat import Encoded
from drafttrain.drafters.checkpoint import list_checkpoints, load_checkpoint, read_meta
from drafttrain.drafters.tuned_settings import PROPOSALS, SPEEDUP, TUNED, draft_up_to, keep_tuned, tuned_settings
from drafttrain.measure import DecodeOptions, MeasureOptions, TuneOptions, cells
from drafttrain.measure.bench import Bench
from drafttrain.measure.cases import LEAST_PROMPTS, Budget, Case, encode_cases, held_out_cases, left_out_notes
from drafttrain.measure.report import rounded
from drafttrain.measure.tuning import DEFAULT, Tuner, search
from drafttrain.runs.checkpoint_source import CheckpointSource
from drafttrain.runs.data import measurement_prompts
from drafttrain.runs.environment import environment
from drafttrain.runs.lock_step import shared_target
from drafttrain.runs.options import RunOptions, dated_path
from drafttrain.targets.load import LoadedTarget

CHOOSING, LEAST_CHOOSING = 32, 8  # held-out conversations that a run's proposal is chosen on; at least, where time is short
FOUND = "tune.json"
SHARE = 1 / 3  # of measure.minutes, for choosing it
BY_HAND = ("draft_length", "window", "fallback")  # of decode: what tuning chooses, or tests without


def tune(options: RunOptions, resolved: dict[str, Any]) -> Path:
    """Search, time, and store the fastest settings; returns the folder of the results, `<output>/tune/<time>/`.

    Raises UserError for bad options, and as `measure` does.
    """
    check_tunable(options)
    source, console = CheckpointSource.of(str(options.checkpoint)), Console()
    folder = dated_path(options.output, "tune")
    prompts = measurement_prompts(options)
    with shared_target(options, "tune") as part:
        loaded = source.load(options.target, part)
        directory = source.checkpoint(loaded, line_printer(console))
        max_prompt = loaded.target.shape.max_positions - options.decode.max_new_tokens
        cases, left_out = encode_cases(prompts, loaded.tokenizer, max_prompt, loaded.images)
        for note in left_out_notes(left_out, len(prompts), max_prompt):
            print_note(console, note)
        wanted = [options.tune.batch_size] if options.tune.batch_size else options.measure.batch_sizes
        if not (sizes := _sizes(wanted, len(cases) // 2, console)):
            few = f"half of the {len(cases)} prompts, {len(cases) // 2}, are fewer than a batch of {min(wanted)}"
            raise UserError(f"{few}; give prompts=FILE with more, or lower tune.batch_size")
        search_result = _searched(directory, loaded, options.tune, sizes, options.decode, cases[0::2], cases[1::2], console)
        if part.first:
            folder = new_directory(folder, partial(_write, search_result))
            _print_finalists(search_result, console)
            _write_choice(directory, search_result, options.tune.write, console)
            print_line(console, f"figures: {folder}")
    return folder


def tune_run(
    run: Path,
    best: Path,
    loaded: LoadedTarget,
    held_out: Sequence[Encoded],
    options: RunOptions,
    console: Console,
) -> dict[str, Any] | None:
    """Store the fastest proposals of a run's best checkpoint with all of its checkpoints; None where there is no choice.

    They are chosen on prompts of conversations that were not trained on, so that the measurement's prompts have no part in it.
    Returns what was found, which is in the run's tune.json.
    """
    minutes = min(options.tune.minutes, SHARE * options.measure.minutes)
    tune, wanted = replace(options.tune, minutes=minutes, repeats=1), options.measure.batch_sizes  # on more prompts
    cases = held_out_cases(held_out, loaded.target.shape.max_positions - options.decode.max_new_tokens)[:CHOOSING]
    if set_by_hand := _by_hand(options.decode):
        print_note(console, f"tuning was left out: decode.{set_by_hand[0]} is set")
        return None
    if not (sizes := _sizes(wanted, len(cases), console)):
        few = f"held-out conversations that fit: {len(cases)}, fewer than a batch of {min(wanted)}"
        print_note(console, f"tuning was left out: {few}; raise data.held_out, or run drafttrain tune")
        return None
    try:
        search_result = _searched(best, loaded, tune, sizes, options.decode, cases, (), console)
    except UserError as error:  # the checkpoints are there, and can be measured as they were trained
        print_note(console, f"tuning was left out: {error}")
        return None
    for found in search_result["batch_sizes"]:
        chosen, line = found["chosen"], "nothing is faster than the trained proposal"
        if chosen["better"]:
            line = f"{chosen['name']}, {chosen['over_default']:.2f}x as fast as the trained proposal"
        print_line(console, f"tuning, batch {found['batch_size']}: {line}, on {len(cases)} held-out conversations")
    if loaded.target.part.first:
        atomic_write_json(run / FOUND, rounded(search_result))
    if loaded.target.part.first and _changes_drafting(search_result):
        for directory in list_checkpoints(run / "checkpoints"):
            keep_tuned(directory, _by_size(search_result), _about(search_result))
    return search_result


def _searched(
    directory: Path,
    loaded: LoadedTarget,
    tune: TuneOptions,
    sizes: Sequence[int],
    decode: DecodeOptions,
    choosing: Sequence[Case],
    deciding: Sequence[Case],
    console: Console,
) -> dict[str, Any]:
    """The results of `search` for this checkpoint, with what they depend on."""
    record, restored = read_meta(directory), load_checkpoint(directory, loaded)
    with stages(console) as watch:
        measure = MeasureOptions(minutes=tune.minutes, repeats=tune.repeats)
        budget = Budget(60 * tune.minutes, LEAST_PROMPTS if deciding else LEAST_CHOOSING)
        bench = Bench(restored.loaded, decode, measure, budget, watch)
        stored = tuned_settings(directory)
        tuner = Tuner(bench, restored.drafter.requires_grad_(False), tune, record.decode, stored=stored)
        search_result: dict[str, Any] = {"batch_sizes": search(tuner, sizes, choosing, deciding), "objective": tune.objective}
    search_result |= {"checkpoint": str(directory), "prompts": len(choosing) + len(deciding)}
    return search_result | {"environment": environment(loaded.target.device), "decode": asdict(decode)}


def _write(found: dict[str, Any], folder: Path) -> None:
    from drafttrain.measure.plots import tuning_plot  # matplotlib, which `fit` can do without

    for result in found["batch_sizes"]:
        tuning_plot(result["surface"], result["chosen"], folder / f"surface-{result['batch_size']}.png")
    atomic_write_json(folder / FOUND, rounded(found))


def _print_finalists(found: dict[str, Any], console: Console) -> None:
    columns = ("proposal", "expected tau", "predicted, over plain decoding", f"measured, over {DEFAULT}")
    for result in found["batch_sizes"]:
        title = f"batch {result['batch_size']}, {found['objective']}: speed on the first half of the prompts"
        table = cells.console_table(title, columns, left=("proposal",))
        for row in result["finalists"]:
            bold = "bold" if row["name"] == result["chosen"]["name"] else ""
            speeds = ("-" if speed is None else f"{speed:.2f}x" for speed in (row["predicted_speedup"], row["raced"]))
            table.add_row(row["name"], cells.number(row["expected_tau"]), *speeds, style=bold)
        console.print(table)


def _write_choice(directory: Path, found: dict[str, Any], write: bool, console: Console) -> None:
    """Print the choices, and write them where one is faster. Batch sizes that were tuned before keep their settings."""
    for result in found["batch_sizes"]:
        print_line(console, f"batch {result['batch_size']}: {_effect(result)}")
        if result["chosen"]["plain_is_faster"]:
            print_line(console, f"batch {result['batch_size']}: plain decoding is faster than every proposal here")
    if not _changes_drafting(found):
        print_line(console, f"{directory / TUNED} stays" if (directory / TUNED).is_file() else "nothing is written")
    elif write:
        before = {size: settings for size, settings in tuned_settings(directory).items() if size}
        file = keep_tuned(directory, before | _by_size(found), _about(found))
        print_line(console, f"stored in {file}; delete it to decode {DEFAULT} again")


def _effect(result: dict[str, Any]) -> str:
    chosen = result["chosen"]
    name, fastest = chosen["name"], chosen["fastest"]
    if "draft_temperature" in chosen["settings"]:
        name += f", draft temperature {chosen['settings']['draft_temperature']:g}"
    over_plain = f"{chosen[SPEEDUP]:.2f}x as fast as plain decoding"
    over_trained = f"{chosen['over_default']:.2f}x as fast as the trained proposal"
    effect = f"nothing was clearly faster than the trained proposal, which is {over_plain}"
    if chosen["better"]:
        effect = f"{name}: {over_trained} and {over_plain} on the other prompts"
    elif chosen["settings"]:
        effect = f"{name} is not faster on the other prompts: {over_trained}, which is {over_plain}"
    if fastest == chosen["name"]:
        return effect
    speeds = {row["name"]: row["raced"] for row in result["finalists"]}
    return f"{effect} ({fastest} came out faster, {speeds[fastest]:.2f}x to {speeds[chosen['name']]:.2f}x, but within noise)"


def _by_size(found: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """What `keep_tuned` takes: the settings of each batch size, none where the trained ones are the fastest. A speedup below 1
    is kept only if it is beyond noise: exports switch drafting off by it.
    """
    tuned = {}
    for result in found["batch_sizes"]:
        chosen = result["chosen"]
        settings = dict(chosen["settings"]) if chosen["better"] else {}
        if chosen[SPEEDUP] >= 1.0 or chosen["plain_is_faster"]:
            settings[SPEEDUP] = chosen[SPEEDUP]
        tuned[result["batch_size"]] = settings
    return dict(rounded(tuned))


def _changes_drafting(found: dict[str, Any]) -> bool:
    """Whether any batch size has a faster proposal, or one is too large for drafting."""
    return any(result["chosen"]["better"] for result in found["batch_sizes"]) or draft_up_to(_by_size(found)) is not None


def _about(found: dict[str, Any]) -> dict[str, Any]:
    facts = {key: found[key] for key in ("objective", "prompts", "environment", "decode")}
    gains = {str(result["batch_size"]): result["chosen"]["over_default"] for result in found["batch_sizes"]}
    names = {
        str(result["batch_size"]): result["chosen"]["proposal"] for result in found["batch_sizes"] if result["chosen"]["better"]
    }
    return dict(rounded(facts | {"over_default": gains, PROPOSALS: names}))


def _by_hand(decode: DecodeOptions) -> list[str]:
    """The user's own settings of what tuning chooses, or tests without."""
    return [name for name in BY_HAND if getattr(decode, name) not in (None, False)]


def check_tunable(options: RunOptions) -> None:
    """Raise UserError for settings of what tuning chooses."""
    if set_by_hand := _by_hand(options.decode):
        raise UserError(f"decode.{set_by_hand[0]} is set, but tune chooses it or tests without it; leave it out")


def _sizes(wanted: Sequence[int], prompts: int, console: Console) -> list[int]:
    """The batch sizes that so many prompts fill; a note says which they do not."""
    fitting = [size for size in dict.fromkeys(wanted) if size <= prompts]
    if fitting and (larger := sorted(set(wanted) - set(fitting))):
        print_note(console, f"batch sizes that were not tuned: {', '.join(map(str, larger))}, more than the {prompts} prompts")
    return fitting
