"""`drafttrain auto target=DIR data.path=FILE export.stacks=[vllm] budget=8h`: picks the drafter, trains, proves and exports it.

The plan is printed and confirmed first. Then candidates race (`runs/race.py`); the winner trains with the rest of the budget.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import re
import shlex
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from optuna.trial import Trial
from rich.console import Console

from drafttrain.commands.fit import check_options
from drafttrain.commands.tune import FOUND, check_tunable
from drafttrain.core.console import StageProgress, bars, counting, line_printer, print_line
from drafttrain.core.errors import UserError
from drafttrain.core.files import atomic_write_json, atomic_write_text
from drafttrain.data.files import read_template
from drafttrain.data.provenance import foreign
from drafttrain.decoding.tree_size import proposal_seconds, verification_seconds
from drafttrain.drafters import families
from drafttrain.engines.process import ENGINES, python_of
from drafttrain.export.serve import STACKS
from drafttrain.export.table import loads, rows
from drafttrain.measure import cells
from drafttrain.measure.plots import race_plot
from drafttrain.measure.report import FILE, rounded
from drafttrain.measure.tuning import predicted_speedup
from drafttrain.model.drafter import trainable
from drafttrain.runs.data import measurement_prompts
from drafttrain.runs.options import AutoOptions, RunOptions
from drafttrain.runs.placement import built
from drafttrain.runs.race import START, Candidate, CandidateRace, TimeBudget, rungs_of
from drafttrain.runs.stacks import by_reason, loadable_by, outlined, untrained
from drafttrain.targets.estimate import format_bytes
from drafttrain.targets.load import LoadedTarget, load_target
from drafttrain.train.checkpoint_manager import best_checkpoint
from drafttrain.train.interrupt import Interrupt

Compose = Callable[[str, Sequence[str]], RunOptions]  # of a recipe and overrides
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
# of the data: where they are, which is another place once the target has answered
SOURCE = tuple(f"data.{key}" for key in ("path", "limit", "split", "config", "files", "revision", "form"))
OWN = ("auto", "budget", "recipe", "output", "name", "resume", "export", "measure")  # what no candidate's command is given
EASILY = 4  # times what a candidate needs in the first round
FIRST_RUNG = 3  # times what it takes to start a training, at least, a candidate has in the first round
ANSWER, ANSWERED = 400, 32  # tokens of an answer of the target, and answers decoded together, in the estimate of their number
REPEATS = 5  # timings of a step
STATE = 12  # bytes of a checkpoint and its optimiser per trained parameter
DECISION, PAGE = "auto.json", "auto.md"
BUILT_IN = "untrained"  # the folder of families that need no training
UNREAD = "unread"  # the path of data that a plan can do without


@dataclass(frozen=True, slots=True)
class AutoPlan:
    """What will be done, known before anything is spent."""

    candidates: list[Candidate]
    known: list[Candidate]  # these and those that are not raced
    left_out: dict[str, str]  # why others are, by recipe
    cut: list[str]  # others for which the budget is too short
    budget: TimeBudget
    foreign: str | None  # why the target may not have written the data's replies
    answers: int | None  # prompts that it can answer in its time; None: all
    unmeasured: str | None  # why the costs are not known


def auto(options: RunOptions, words: Sequence[str], compose: Compose, flags: Sequence[str] = ()) -> Path | None:
    """Returns the folder of the decision, `<output>/auto/<name>/`; None with `export.plan`, which prints the plan alone.

    words: as typed. flags: for every command, such as `--config-dir`. Raises UserError for bad input, before anything is spent.
    """
    console, total = Console(), seconds_of(options.budget)
    _check(options, words)
    kept = [word for word in words if not _is(word, OWN)]
    typed = sorted(word for word in words if not _is(word, ("auto.yes", "auto.share", "output")))
    digest = hashlib.sha256("\n".join(typed).encode()).hexdigest()[:8]
    folder = Path(options.output).absolute() / "auto" / f"{Path(str(options.target.path or options.target.name)).name}-{digest}"
    if (folder / PAGE).is_file():
        print_line(console, f"this has been decided; delete {folder} to do it again")
        console.print((folder / PAGE).read_text(encoding="utf-8"), markup=False, highlight=False, soft_wrap=True)
        return folder
    begun = CandidateRace.study_of(folder, []).user_attrs.get("candidates") if folder.is_dir() else None
    also = [word for word in words if _is(word, ("auto.also",))]
    plan = _plan(options, [*kept, *also], total, begun, compose, console)
    _print_plan(plan, options.auto.batch_sizes, console)
    if options.target.name != "embedded" and (options.prompts or options.measure.prompts) == "embedded":
        unlike = "the winner is measured on those of the package, which may be unlike your data"
        print_line(console, f"prompts: {unlike}; measure.prompts=FILE names yours")
    if options.export.plan:
        return None
    if plan.unmeasured is not None:
        raise UserError(plan.unmeasured)
    if begun is None:
        _confirm(options, console)
    with Interrupt() as interrupt, interrupt.deferred():
        _run(plan, options, words, kept, flags, folder, interrupt, console)
    return folder


def _check(options: RunOptions, words: Sequence[str]) -> None:
    """Raise UserError for what no candidate could be trained or decided with."""
    if options.launcher.name != "local":
        raise UserError(f"launcher={options.launcher.name} is for the command line: drafttrain auto --yes launcher=slurm")
    if typed := [word for word in words if _is(word, ("recipe", "name", "resume"))]:
        raise UserError(f"auto does not read {typed[0]}; auto.candidates=[NAME,NAME] names recipes")
    measure, sizes, parallel = options.measure, options.auto.batch_sizes, options.auto.parallel
    if not measure.enabled or measure.tune_only or not measure.tune:
        raise UserError("auto decides by what is tuned and measured; leave out measure=off, measure.tune and measure.tune_only")
    if (share := options.auto.share) and (len(share) != 2 or share[0] > share[1]):
        raise UserError(f"auto.share is {share}; leave it out, launcher=slurm sets it for each of launcher.nodes")
    if not sizes:
        raise UserError("auto.batch_sizes is empty; name one, as auto.batch_sizes=[1]")
    if torch.cuda.is_available() and parallel > torch.cuda.device_count():
        raise UserError(f"auto.parallel is {parallel}, more than the {torch.cuda.device_count()} GPUs; lower it")
    if options.data.held_out is not None and options.data.held_out < max(2, *sizes):
        raise UserError(
            f"data.held_out is {options.data.held_out}, too few to predict speedups on; raise it to {max(16, *sizes)}"
        )
    check_tunable(options)
    measurement_prompts(options)


def seconds_of(budget: str) -> float:
    """Worked example: `90m` and `1.5h` are 5400 seconds. Raises UserError for another form."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", budget)
    if match is None or not float(match[1]):
        raise UserError(f"budget is {budget!r}; write it as 45m, 8h or 2d")
    return float(match[1]) * UNITS[match[2]]


def time_text(seconds: float) -> str:
    """Worked examples: 5400 seconds are `1.5 hours`, and 450 are `7.5 minutes`."""
    if seconds < 100:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.2g} minutes" if seconds < 5400 else f"{seconds / 3600:.3g} hours"


def _longer(seconds: float) -> str:
    """A budget of twice the time, as it is typed."""
    return f"{math.ceil(seconds / 30)}m"


def _is(word: str, keys: Sequence[str]) -> bool:
    """Whether an override is of one of these groups or keys."""
    key = word.partition("=")[0].lstrip("+~")
    return any(key == name or key.startswith(f"{name}.") for name in keys)


def _plan(
    options: RunOptions, typed: Sequence[str], total: float, begun: Sequence[str] | None, compose: Compose, console: Console
) -> AutoPlan:
    """typed: what holds for every candidate. begun: the candidates of a race that goes on."""
    known, left_out = _candidates(options, typed, compose)
    candidates = known if begun is None else [each for each in known if each.name in begun]
    time_began, reason, answers = monotonic(), None, None

    def most(budget: TimeBudget, start: float) -> int:
        return len(candidates) if begun is not None else _affordable(candidates, budget, FIRST_RUNG * start, options.auto)

    try:
        loaded = load_target(options.target)
    except UserError as error:
        count = most(budget := TimeBudget(total), START)
        return AutoPlan(candidates[:count], known, left_out, _cut(candidates[count:]), budget, None, None, str(error))
    start, is_known = START + monotonic() - time_began, options.data.path != UNREAD
    budget = TimeBudget(total, is_known and (reason := _foreign(options, loaded)) is not None)
    count = most(budget, start)
    racing = candidates if count == len(candidates) else [each for each in candidates if not each.settings]
    costed, costly = _costed(racing, count, loaded, options.auto.batch_sizes, console)
    left_out |= costly
    if reason is not None and options.data.mix:
        raise UserError(f"data.mix: {reason}; answer it first, with drafttrain prepare, and give data.path=DIR")
    if reason is not None and options.prepare.server is None:
        drafter = built(costed[0].options, loaded.target).to(loaded.target.device)
        step = verification_seconds(loaded.target, drafter, [1], REPEATS, ANSWERED)[1]
        answers = max(ANSWERED, round(budget.answers * ANSWERED / step / ANSWER))
    loaded.target.free()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the commands load it anew
    if begun is None and budget.rest(len(costed)) <= 0:
        raise UserError(f"budget is {time_text(total)}, which leaves the winner no time to train; set budget={_longer(total)}")
    cut = [each for each in candidates if each.name not in {*left_out, *(each.name for each in costed)}]
    return AutoPlan(costed, known, left_out, _cut(cut), budget, reason, answers, None)


def _cut(candidates: Sequence[Candidate]) -> list[str]:
    """What a plan says of candidates that its budget is too short for."""
    plain = [each.name for each in candidates if not each.settings]
    return plain + (["further settings (auto.also)"] if len(plain) < len(candidates) else [])


def _candidates(options: RunOptions, typed: Sequence[str], compose: Compose) -> tuple[list[Candidate], dict[str, str]]:
    """(what can be trained here and is loaded by the stacks; why others are left out).

    As named, else in the order in which they are raced where a budget is too short for all.
    """
    for stack in (stack for stack in options.export.stacks if stack not in STACKS):
        raise UserError(f"export.stacks names {stack!r}; choose of {', '.join(STACKS)}")
    named = _split(options.auto.candidates, "auto.candidates", "write a recipe, and settings behind it")
    target, left_out, found = outlined(options.target), dict[str, str](), list[Candidate]()
    queue = deque(named or [[name] for name in families()])
    while queue:
        recipe, *settings = queue.popleft()
        used = sum(name.partition("-")[0] == recipe for name in [*left_out, *(each.name for each in found)])
        name = f"{recipe}-{used + 1}" if used else recipe
        if not named and (reason := _unserved(recipe, options.export.stacks)) is not None:
            left_out[name] = reason
            continue
        try:
            candidate_options = compose(recipe, [*typed, *settings])
            check_options(candidate_options)
            drafter = untrained(candidate_options, target)
        except UserError as error:
            if named:
                raise
            left_out[name] = str(error)
            continue
        loadable, refused = loadable_by(candidate_options, target, drafter)
        reasons = {
            stack: row for stack, row in rows(candidate_options.drafter.family).items() if isinstance(row, str)
        } | refused
        if not drafter.trained:
            left_out[name] = "nothing is trained; drafttrain fit recipe=NAME measures it"
        elif missing := [stack for stack in options.export.stacks if stack not in loadable]:
            left_out[name] = f"{missing[0]} cannot load it: {reasons[missing[0]]}"
        elif not (loadable or named):
            left_out[name] = f"no stack loads it: {next(iter(reasons.values()))}"
        else:
            found.append(Candidate(name, recipe, tuple(settings), candidate_options, loadable, trainable(drafter)))
            if not (named or settings):
                further = _split(candidate_options.auto.also, "auto.also", "write settings")
                queue.extend([recipe, *words] for words in further)
    if not found:
        why = "; ".join(f"{name}: {reason}" for name, reason in list(left_out.items())[:3])
        raise UserError(f"no candidate is left for {', '.join(options.export.stacks) or 'any stack'}: {why}")
    early = {name: family.early for name, family in families().items()}
    order = sorted(found, key=lambda each: (bool(each.settings), -early[each.options.drafter.family]))
    return found if named else order, left_out


def _split(lines: Sequence[str], key: str, fix: str) -> list[list[str]]:
    """The words of each entry, as a shell reads them."""
    try:
        entries = [shlex.split(line) for line in lines]
    except ValueError as error:
        raise UserError(f"{key}: {error}; {fix}") from error
    if not all(entries):
        raise UserError(f"{key} has an empty entry; {fix}")
    return entries


def _unserved(family: str, stacks: Sequence[str]) -> str | None:
    """Why these stacks, or all, cannot load a family in any form."""
    reasons = {stack: row for stack, row in rows(family).items() if isinstance(row, str)}
    if not loads(family):
        return f"no stack loads it: {next(iter(reasons.values()))}"
    missing = [stack for stack in stacks if stack in reasons]
    return f"{missing[0]} cannot load it: {reasons[missing[0]]}" if missing else None


def _costed(
    candidates: Sequence[Candidate], most: int, loaded: LoadedTarget, sizes: Sequence[int], console: Console
) -> tuple[list[Candidate], dict[str, str]]:
    """The first candidates that can gain, `most` at most, with the costs of their steps; why those before them cannot.

    A step's cost does not depend on weights.
    """
    costed, left_out, target = list[Candidate](), dict[str, str](), loaded.target
    with counting(console, "costs of a step", most) as advance:
        for each in candidates:
            if len(costed) == most:
                break
            drafter, costs = built(each.options, target).to(target.device).requires_grad_(False), dict[int, float]()
            nodes = max(2, drafter.proposal.max_nodes + drafter.proposal.more_nodes)
            for size in sizes:
                passes = verification_seconds(target, drafter, [1, nodes], REPEATS, size)
                costs[size] = (proposal_seconds(target, drafter, REPEATS, size) + passes[nodes]) / passes[1]
            least, tokens = min(costs.values()), drafter.draft_length + 1
            if least < tokens:
                costed.append(replace(each, costs=costs))
                advance(1)
            else:
                left_out[each.name] = f"a step takes {least:.1f} plain steps, and gives {tokens} tokens at most"
    if not costed:
        raise UserError(f"no drafter can gain on this device: {'; '.join(f'{name}: {why}' for name, why in left_out.items())}")
    return costed, left_out


def _foreign(options: RunOptions, loaded: LoadedTarget) -> str | None:
    """Why the target may not have written the data's replies; None if it has."""
    template = read_template(options.data.template) or loaded.tokenizer.chat_template
    reasons = (foreign(path, loaded.description, template) for path in options.data.paths)
    return next((reason for reason in reasons if reason is not None), None)


def _affordable(candidates: Sequence[Candidate], budget: TimeBudget, least: float, auto: AutoOptions) -> int:
    """How many candidates the budget can race with `least` seconds each in the first round, from the first on.

    Those of `auto.also` count where each can have `EASILY` times as much. Raises UserError where the budget is too short for
    those that the user names, or for two.
    """
    named, parallel = bool(auto.candidates), auto.parallel * (auto.share[1] if auto.share else 1)
    count = sum(named or not each.settings for each in candidates)
    if count <= (most := budget.most_candidates(least, parallel)):
        return len(candidates) if len(candidates) <= budget.most_candidates(EASILY * least, parallel) else count
    if named or most < 2:
        wanted = count if named else 2
        seconds = least * rungs_of(wanted) * math.ceil(wanted / parallel)
        minutes = math.ceil(budget.total / budget.race * seconds / 60)
        raise UserError(
            f"budget is {time_text(budget.total)}, too short for a race of {wanted}: the first round takes {least:.0f} seconds "
            f"of each; set budget={minutes}m" + (", or name fewer auto.candidates" if named else "")
        )
    return most


def _print_plan(plan: AutoPlan, sizes: Sequence[int], console: Console) -> None:
    say, budget, count = partial(print_line, console), plan.budget, len(plan.candidates)
    columns = ("candidate", "loaded by", *(f"tau to gain, batch {size}" for size in sizes), "parameters")
    table = cells.console_table("candidates", columns, left=("candidate", "loaded by"), space=2)
    for each in plan.candidates:
        costs = (cells.number(each.costs.get(size)) for size in sizes)
        stacks = ", ".join(each.stacks) if len(each.stacks) < 4 else f"{len(each.stacks)} stacks"
        table.add_row(each.name, stacks or "none", *costs, f"{each.parameters:,}")
    console.print(table)
    for settings, names in by_reason({each.name: " ".join(each.settings) for each in plan.candidates if each.settings}).items():
        say(f"  {', '.join(names)}: with {settings}")
    for reason, names in by_reason(plan.left_out).items():
        say(f"  not {', '.join(names)}: {reason}", style="dim")
    if plan.cut:
        say(f"  the budget is too short for {', '.join(plan.cut)}; auto.candidates names others", style="dim")
    if plan.unmeasured is not None:
        say(f"costs are not measured: {plan.unmeasured}")
    parts = []
    if plan.foreign is not None:
        number = "the" if plan.answers is None else f"at most {plan.answers:,}"
        say(f"data: {plan.foreign}; the target answers {number} prompts first")
        parts.append(f"{time_text(budget.answers)} for answers")
    race = budget.race if count > 1 else 0.0
    if race:
        parts.append(f"{time_text(race)} for a race" + (f" in {rungs_of(count)} rounds" if rungs_of(count) > 1 else ""))
    parts += [
        f"{time_text(max(0.0, budget.rest(count)))} for the winner",
        f"{time_text(budget.reserve)} to measure and export it",
    ]
    say(f"budget: {time_text(budget.total)}: {', '.join(parts)}")
    trained = sum(each.parameters for each in plan.candidates)
    say(f"disk: about {format_bytes(3 * STATE * trained)} of checkpoints")


def _confirm(options: RunOptions, console: Console) -> None:
    if options.auto.yes:
        return
    if not sys.stdin.isatty():
        raise UserError(f"auto asks before it spends {options.budget}, and there is no terminal to ask on; add --yes")
    if console.input("start? [y/N] ").strip().lower() not in ("y", "yes"):
        raise UserError("nothing was started; --plan prints the plan alone")


def _run(
    plan: AutoPlan,
    options: RunOptions,
    words: Sequence[str],
    kept: list[str],
    flags: Sequence[str],
    folder: Path,
    interrupt: Interrupt,
    console: Console,
) -> None:
    study, settings = CandidateRace.study_of(folder, [each.name for each in plan.candidates]), options.auto
    node, nodes = settings.share or (None, 1)
    with bars(console) as progress:
        stage = StageProgress(progress, "budget, seconds", round(plan.budget.total), lines=False)
        race = CandidateRace(
            folder,
            study,
            plan.known,
            plan.budget,
            settings.batch_sizes,
            settings.parallel,
            kept,
            line_printer(progress.console),
            interrupt,
            list(flags),
            lambda label, spent: stage.update(round(spent), label),
            (node, nodes) if node else None,
        )
        race.say(f"folder: {folder}" + (f", {time_text(race.spent_before)} are spent" if race.spent_before else ""))
        if plan.foreign is not None:
            _answer(race, options, plan.answers)
        if node is not None:
            if node:
                race.run()
            return
        winner = race.winner()
        _finish(race, winner, [word for word in words if _is(word, ("measure",))])
        results = dict(_handed_over(race, winner, options.export.stacks, words))
    decision = _decision(race, winner, results)
    race_plot([(trial.user_attrs["name"], trial.user_attrs.get("points", [])) for trial in study.trials], folder / "auto.png")
    atomic_write_json(folder / DECISION, rounded(decision))
    page = _page(decision, plan)
    atomic_write_text(folder / PAGE, page)
    study.tell(winner, (decision["predicted"] or {"value": decision["entry"]["speedup"] or 0.0})["value"])
    console.print(page, markup=False, highlight=False, soft_wrap=True)


def _answer(race: CandidateRace, options: RunOptions, most: int | None) -> None:
    """Let the target answer the data's prompts, and train on its answers."""
    out, limits = race.folder / "data", [limit for limit in (most, options.data.limit) if limit is not None]
    if not out.is_dir():
        words = [word for word in race.words if _is(word, ("target", "data", "prepare", "launcher"))]
        if limits and "answers" not in race.study.user_attrs:
            race.study.set_user_attr("answers", min(limits))
        limit = [f"data.limit={race.study.user_attrs['answers']}"] if limits else []
        race.say("the target answers the data's prompts")
        if failed := race.command("answers", ["prepare", *words, *limit, f"out={out}"]):
            raise UserError(f"the target's answers could not be written: {failed}")
    race.words = [word for word in race.words if not _is(word, SOURCE) and not word.startswith("data=")]
    race.words += ["data=file", f"data.path={out}"]


def _finish(race: CandidateRace, winner: Trial, words: Sequence[str]) -> None:
    """Train the winner with the rest of the budget, tune and measure it. words: the user's of the measurement."""
    if "start last" in winner.user_attrs:
        return
    budget, name = race.budget, winner.user_attrs["name"]
    seconds = budget.total - race.spent - budget.reserve - winner.user_attrs["start try"]
    steps = race.plan_steps(winner, "last", seconds)
    run = race.run_of(winner)
    assert run is not None
    (run / FOUND).unlink(missing_ok=True)
    race.say(f"{name} goes on to step {steps:,}, about {time_text(max(0.0, seconds))}")
    timed = [f"measure.minutes={budget.minutes:.3g}", "measure.transformers=false", *words]
    if not race.fit(winner, "last", steps, timed):
        raise UserError(f"{name} has won, but its training failed: {winner.user_attrs['failed']}")


def _handed_over(race: CandidateRace, winner: Trial, stacks: Sequence[str], words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(a part of what follows the winner's training, why it failed): measuring sampling and what needs no training, exports,
    engines that are here.
    """
    run = race.run_of(winner)
    assert run is not None
    checkpoint, out = f"checkpoint={best_checkpoint(run / 'checkpoints')}", race.folder / "exported"
    target = [word for word in race.words if _is(word, ("target",))]
    minutes, output = f"measure.minutes={race.budget.minutes / 2:.3g}", f"output={race.folder / 'measured'}"
    same = [word for word in words if _is(word, ("decode", "measure")) and not word.startswith(("decode=", "measure="))]
    commands = {"sampling": ["measure", checkpoint, *target, "decode=sampling", *same, minutes, output]}
    for name in _built_in() if race.budget.compares else ():
        quick = [f"measure.minutes={race.budget.minutes / 4:.3g}", "measure.transformers=false", *race.sizes]
        given = [*race.words, *same, *quick, f"name={name}", f"output={race.folder / BUILT_IN}"]
        commands[f"{name} measured"] = ["fit", f"recipe={name}", *given]
    changes = [word for word in words if _is(word, ("export.rope_scaling",))]
    for stack in stacks or race.candidate(winner).stacks:
        place = f"out={out / stack}"
        commands[f"export {stack}"] = ["export", checkpoint, *target, *changes, f"format={stack}", place, "overwrite=true"]
        for engine in _engines(stack):
            commands[f"verify {engine}"] = ["verify", checkpoint, *target, f"engine={engine}", place, output]
    for label, line in commands.items():
        key = f"result of {label}"
        if key not in race.study.user_attrs:
            race.say(label)
            race.study.set_user_attr(key, race.command(label, line) or "")
        yield label, race.study.user_attrs[key]


def _built_in() -> list[str]:
    """Families that need no training, which stacks have built in."""
    return [name for name, family in families().items() if family.unserved and not getattr(family.make, "trained", True)]


def _engines(stack: str) -> Iterator[str]:
    """The engines on this machine that load a stack's exports."""
    for name, engine in ENGINES.items():
        if stack in engine.loads:
            try:
                python_of(name, None)
            except UserError:
                continue
            yield name


def _decision(race: CandidateRace, winner: Trial, results: dict[str, str]) -> dict[str, Any]:
    """What was decided, with the figures that it rests on."""
    run = race.run_of(winner)
    assert run is not None
    report = json.loads((run / FILE).read_text(encoding="utf-8"))
    entry = next(each for each in report["checkpoints"] if each["name"] == report["best"])
    last = (winner.user_attrs.get("points") or [None])[-1]
    predicted = dict(zip(("value", "low", "high"), predicted_speedup(found), strict=True)) if (found := _found(run)) else last
    by_size = [entry, *(each for each in entry["slices"] if each["by"] == "batch_size")]
    sampled = sorted((race.folder / "measured").glob(f"measure/*/{FILE}"))
    built_in = {name: sorted((race.folder / BUILT_IN / name).glob(f"*/{FILE}")) for name in _built_in()}
    serving = {
        label.removeprefix("export "): _serving(race.folder / "exported" / label.removeprefix("export "))
        for label, failed in results.items()
        if label.startswith("export ") and not failed
    }
    return {
        "recipe": str(race.candidate(winner)),
        "checkpoint": str(run / "checkpoints" / str(report["best"]).split()[0]),
        "report": str(run / "report.html"),
        "prompts": report["measure"]["prompts"],
        "predicted": predicted,
        "measured": {str(each["batch_size"]): each["speedup"] for each in by_size},
        "entry": {key: entry[key] for key in ("tau", "speedup", "speedup_min", "speedup_max", "exact_matches", "prompts")},
        "sampled": _best(sampled[-1]) if sampled else None,
        "untrained": {name: _best(reports[-1])["speedup"] for name, reports in built_in.items() if reports},
        "results": results,
        "serving": serving,
        "spent_seconds": race.spent,
        "candidates": [
            {
                "name": trial.user_attrs["name"],
                "state": trial.state.name.lower(),
                "failed": trial.user_attrs.get("failed"),
                "points": trial.user_attrs.get("points", []),
            }
            for trial in race.study.trials
        ],
    }


def _found(run: Path) -> dict[str, Any] | None:
    """What tuning found; None where it was left out."""
    file = run / FOUND
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def _best(report: Path) -> dict[str, Any]:
    content = json.loads(report.read_text(encoding="utf-8"))
    entry = next(each for each in content["checkpoints"] if each["name"] == content["best"])
    return {key: entry[key] for key in ("tau", "speedup", "temperature")}


def _serving(export: Path) -> str:
    """The command, or the lines of Python, in the model card of an export."""
    match = re.search(r"```(?:bash|python)\n(.*?)\n```", (export / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    return match[1] if match else f"see {export / 'README.md'}"


def _page(decision: dict[str, Any], plan: AutoPlan) -> str:
    """auto.md: the decision in a sentence, the race, what else was found."""
    predicted, entry, forecast = decision["predicted"], decision["entry"], ""
    if predicted:
        forecast = (
            f"Predicted over the batch sizes, on held-out conversations: {predicted['value']:.2f}x ({predicted['low']:.2f} to "
            f"{predicted['high']:.2f})."
        )
    speeds = ", ".join(f"{cells.number(speed)}x at batch size {size}" for size, speed in decision["measured"].items())
    gains = (entry["speedup"] or 0.0) > 1.0
    verdict = f"Serve with `{decision['recipe']}`" if gains else f"Serve without a drafter: `{decision['recipe']}` is the best"
    faults = [label for label, failed in decision["results"].items() if failed and label.startswith(("export", "verify"))]
    if entry["exact_matches"] is not None and entry["exact_matches"] < entry["prompts"]:
        faults.append("the comparison with plain decoding")
    if faults:
        verdict = f"Do not serve `{decision['recipe']}` yet, {', '.join(faults)} failed"
    speedups = {name: speed for name, speed in decision["untrained"].items() if speed is not None}
    others = ", ".join(f"`{name}` {cells.number(speed)}x" for name, speed in speedups.items())
    best = max(speedups, key=lambda name: speedups[name], default="")
    if best and not faults and speedups[best] > max(1.0, entry["speedup"] or 0.0):
        own = f"`{best}`, {cells.number(speedups[best])}x without training"
        verdict = f"Serve with the stack's own {own}. `{decision['recipe']}`"
    sampled, sampling = decision["sampled"], ""
    if sampled:
        sampling = f"Lossless sampling at temperature {sampled['temperature']:g}: {cells.number(sampled['speedup'])}x. "
    lines = [
        f"# {verdict}: {speeds}",
        f"Tau is {cells.number(entry['tau'])}, and {cells.exact(entry)} outputs are those of plain decoding (prompts: "
        f"{decision['prompts']}). {sampling}"
        f"{forecast}{f' Without training: {others}.' if others else ''}",
        "![Predicted speedup by training time](auto.png)",
        cells.rows(("candidate", "steps", "trained for", "predicted speedup", "end"), map(_row, decision["candidates"])),
        f"Checkpoint: `{decision['checkpoint']}`. Report: `{decision['report']}`. Spent: "
        f"{time_text(decision['spent_seconds'])} of {time_text(plan.budget.total)}.",
    ]
    lines += [f"{label} failed: {failed}" for label, failed in decision["results"].items() if failed]
    lines += [f"Serve it with {stack}:\n\n```\n{command}\n```" for stack, command in decision["serving"].items()]
    left_out = [f"- {', '.join(names)}: {reason}" for reason, names in by_reason(plan.left_out).items()]
    left_out += [f"- {', '.join(plan.cut)}: the budget is too short"] if plan.cut else []
    return "\n\n".join(lines + (["Left out of the race:", "\n".join(left_out)] if left_out else [])) + "\n"


def _row(candidate: dict[str, Any]) -> tuple[str, ...]:
    ends = {"running": "won", "complete": "won", "pruned": f"went after round {len(candidate['points'])}"}
    end = candidate["failed"] or ends.get(candidate["state"], candidate["state"])
    if not candidate["points"]:
        return candidate["name"], cells.MISSING, cells.MISSING, cells.MISSING, end
    last = candidate["points"][-1]
    speed = f"{last['value']:.2f}x ({last['low']:.2f} to {last['high']:.2f})"
    return candidate["name"], f"{last['steps']:,}", time_text(last["seconds"]), speed, end
