"""`drafttrain simulate [report=FILE | checkpoint=DIR] [out=FILE.png]`: speedup by formula from acceptance and costs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from drafttrain.core.errors import UserError
from drafttrain.core.files import atomic_write_json, new_file
from drafttrain.measure.cells import console_table
from drafttrain.measure.compare.runs import find_runs, rows_of
from drafttrain.measure.report import rounded
from drafttrain.measure.simulate.formulas import distinct_experts, operations
from drafttrain.measure.simulate.plot import simulation_plot
from drafttrain.measure.simulate.scenario import MOST_BATCH, Experts
from drafttrain.measure.simulate.simulation import Measured, Simulation, run_simulation
from drafttrain.runs.options import RunOptions, dated_path


def simulate(options: RunOptions, resolved: dict[str, Any]) -> Path:
    """Print the tables, draw the plots and write the figures as JSON; returns the path of the plots.

    Raises UserError for bad options, and for reports that cannot be read or have no timings.
    """
    picture, settings = _picture(options), options.simulate
    simulation = run_simulation(settings, _measured(options))
    console = Console(highlight=False)
    for line in assumptions(simulation):
        console.print(line, soft_wrap=True)
    console.print(chain_table(simulation, settings.alphas, simulation.scenario.costs.draft))
    console.print(shape_table(simulation))
    for line in findings(simulation):
        console.print(line, soft_wrap=True)
    figures = rounded(simulation.plain())
    if picture is None:
        content = json.dumps(figures, indent=2, allow_nan=False) + "\n"
        picture = new_file(dated_path(options.output, "simulate", ".json"), content.encode()).with_suffix(".png")
    else:
        picture.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_json(picture.with_suffix(".json"), figures)
    simulation_plot(simulation, settings.alphas, picture)
    console.print(f"picture: {picture}", soft_wrap=True)
    return picture


def _measured(options: RunOptions) -> Measured | None:
    """The checkpoint that the user names, or the best one of the report."""
    if options.checkpoint is not None and options.report is not None:
        raise UserError(f"report is {options.report!r} and checkpoint {options.checkpoint!r}; leave one of them out")
    named = options.report or options.checkpoint
    if named is None:
        return None
    rows = rows_of(find_runs([named]).reports, "best")
    if not rows:
        raise UserError(
            f"{named} has no report of its own; give report=DIR, the folder that drafttrain measure checkpoint={named} prints"
        )
    if len(rows) > 1:
        raise UserError(f"{named} holds {len(rows)} reports; name one of them, such as report={rows[0].run.where}")
    return Measured.of(f"{rows[0].label} {rows[0].entry['name']}", rows[0].entry)


def _picture(options: RunOptions) -> Path | None:
    """The picture that the user names, if any. Raises UserError for another kind of file."""
    if options.out is None:
        return None
    path = Path(options.out).expanduser()
    if path.suffix != ".png" or path.is_dir():
        raise UserError(f"out is {options.out!r}; name the picture with out=FILE.png")
    return path


def assumptions(simulation: Simulation) -> list[str]:
    """The assumptions, one sentence each."""
    scenario, costs = simulation.scenario, simulation.scenario.costs
    alphas = " ".join(f"{alpha:.2f}" for alpha in scenario.alpha_K)
    where = "at every position" if len(scenario.alpha_K) == 1 else "by position, the last one for all later positions"
    passes = "one pass gives all drafts" if costs.parallel else "one pass per draft"
    origin = "assumed" if simulation.measured is None else f"from {simulation.measured.name} unless set"
    lines = [] if costs.experts is None else [experts_line(costs.experts)]
    return [
        f"acceptance {alphas} {where}",
        f"costs in plain steps: {costs.draft:.3g} for a draft pass ({passes}), {costs.token:.3g} for each further token in the "
        f"target's pass, {costs.other:.3g} for the rest of a step ({origin})",
        *lines,
    ]


def experts_line(experts: Experts) -> str:
    """How many experts passes of some sizes read, and what the passes cost by that."""
    E, k = experts.count, experts.chosen
    passes = ", ".join(f"{m} tokens {distinct_experts(m, E, k):.0f} ({experts.pass_cost(m):.2f})" for m in (1, 4, 8, 16))
    return f"a layer has {E} experts, a token reads {k}; distinct experts, and reads in plain steps, of {passes}"


def chain_table(simulation: Simulation, alphas: Sequence[float], draft_operations: float) -> Table:
    """Chains by length: expected tokens, cost, speedup and arithmetic, and the speedup at other acceptances; best in bold."""
    columns = ("K", "tokens", "c_v", "speedup", "operations", *(f"at {alpha:g}" for alpha in alphas))
    table = console_table("chains at batch 1", columns, left=())
    scenario = simulation.scenario
    best = {alpha: scenario.at(alpha).best_chain().depth for alpha in alphas}
    best_length = scenario.best_chain().depth
    for chain in simulation.chains:
        K = chain.depth
        line = [str(K), f"{chain.tokens:.2f}", f"{scenario.costs.verify(K + 1):.2f}"]
        line += [_bold(f"{chain.speedup:.2f}x", best_length == K), f"{operations(chain.tokens, K, draft_operations):.2f}x"]
        line += [_bold(f"{scenario.at(alpha).chain(K).speedup:.2f}x", best[alpha] == K) for alpha in alphas]
        table.add_row(*line)
    return table


def shape_table(simulation: Simulation) -> Table:
    """The best chain and trees, and the best chain by batch size, beside the speedup of the report's own proposal."""
    measured = {} if simulation.measured is None else simulation.measured.speedups
    columns = ("shape", "batch", "nodes", "depth", "tokens", "speedup", *(["measured"] if measured else []))
    table = console_table("best of each shape", columns, left=("shape",), space=2)
    rows = [(1, shape) for shape in simulation.trees] + [
        (size, shape) for size, shape in simulation.batches.items() if size > 1
    ]
    for size, shape in rows:
        figures = [f"{shape.tokens:.2f}", f"{shape.speedup:.2f}x", f"{measured[size]:.2f}x" if size in measured else ""]
        table.add_row(shape.name, str(size), str(shape.nodes), str(shape.depth), *figures[: len(columns) - 4])
    return table


def findings(simulation: Simulation) -> Iterator[str]:
    """Break-even points, the simulated trials compared with the formulas, and the effect of the requested acceptance."""
    draft, batch, alpha = simulation.break_even_draft_cost, simulation.break_even_batch, simulation.break_even_alpha
    yield (
        "no speedup at any draft cost"
        if draft is None
        else f"no speedup where a draft pass costs {draft:.3f} plain steps or more"
    )
    yield (
        "no speedup at any acceptance"
        if alpha is None
        else f"no speedup where acceptance is below {alpha:.3f} at every position"
    )
    if batch is None:
        yield f"a speedup at every batch size up to {MOST_BATCH}"
    else:
        yield "no speedup at any batch size" if batch == 1 else f"no speedup from batch size {batch} on"
    lengths = ", ".join(f"{length or 'none'} from {size}" for size, length in simulation.lengths_by_batch.items())
    yield f"best draft length by batch size: {lengths}"
    for trial in simulation.trials:
        verdict = "agrees" if trial.agrees else "DIFFERS"
        yield (
            f"{trial.policy} on a {trial.shape}: {trial.mean:.3f} ± {trial.error:.3f} tokens simulated, {trial.formula:.3f} by "
            f"formula: {verdict}"
        )
    yield from _what_if(simulation)


def _what_if(simulation: Simulation) -> Iterator[str]:
    measured = simulation.measured
    if measured is None:
        return
    tau, speed = measured.expected()
    if measured.chain_K != measured.alpha_K:
        yield "measured with a tree: the chains above take its first choices, given that the path above is among its first ten"
    yield f"{measured.name}: measured tau {measured.tau:.2f}, {measured.speedup:.2f}x; by formula {tau:.2f}, {speed:.2f}x"
    if simulation.requested_alpha is not None:
        then, faster = measured.expected(simulation.requested_alpha_K)
        change = "with this acceptance" if simulation.change is None else f"with alpha {simulation.change:+g}"
        yield f"{change}, all else as measured: tau {then:.2f}, {faster:.2f}x ({faster / speed - 1:+.0%})"


def _bold(text: str, is_best: bool) -> str:
    return f"[bold]{text}[/bold]" if is_best else text
