"""Draws a simulation: four plots in one PNG file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.axes import Axes

from drafttrain.measure.plots import INK, colour, panels, save
from drafttrain.measure.simulate.simulation import Simulation

SHOWN_LENGTHS = (1, 3, 5, 8)


def simulation_plot(simulation: Simulation, alphas: Sequence[float], path: Path) -> Path:
    """Draw speedup by draft length, batch size, draft cost and tree size."""
    figure, panel_axes = panels(4, 10.0, columns=2, height=7.6)
    _by_length(panel_axes[0], simulation, alphas)
    _by_batch(panel_axes[1], simulation)
    _by_draft_cost(panel_axes[2], simulation)
    _by_nodes(panel_axes[3], simulation)
    for axes in panel_axes:
        axes.axhline(1.0, color=INK, linewidth=1, linestyle="--")
        axes.set_ylabel("speedup")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=8)
    return save(figure, path)


def _by_length(axes: Axes, simulation: Simulation, alphas: Sequence[float]) -> None:
    scenario = simulation.scenario
    lengths = sorted(scenario.lengths)
    curves = [(f"acceptance {alpha:g}", scenario.at(alpha), "-") for alpha in alphas if scenario.alpha_K != (alpha,)]
    for i, (label, curve_scenario, style) in enumerate([*curves, (_own(simulation), scenario, "-")]):
        values = [curve_scenario.chain(K).speedup for K in lengths]
        is_ours, best = i == len(curves), max(range(len(values)), key=lambda k: values[k])
        width, tint = (2.4, INK) if is_ours else (1.4, colour(i))
        axes.plot(lengths, values, style, color=tint, linewidth=width, label=label)
        axes.plot([lengths[best]], [values[best]], "o", color=tint, markersize=5)
    axes.set_title("Length of a chain", loc="left", fontweight="bold")
    axes.set_xlabel("drafts K (dot: best)")


def _by_batch(axes: Axes, simulation: Simulation) -> None:
    sizes = sorted(simulation.batches)
    lengths = [K for K in SHOWN_LENGTHS if K in simulation.scenario.lengths] or list(simulation.scenario.lengths)[:3]
    for i, K in enumerate(lengths):
        values = [simulation.scenario.chain(K, size).speedup for size in sizes]
        axes.plot(sizes, values, color=colour(i), linewidth=1.4, label=f"K = {K}")
    axes.plot(sizes, [simulation.batches[s].speedup for s in sizes], color=INK, linewidth=2.4, label="best K")
    if simulation.break_even_batch is not None and simulation.break_even_batch <= sizes[-1]:
        axes.plot([simulation.break_even_batch], [1.0], "x", color=INK, markersize=7)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    edge = simulation.break_even_batch
    axes.set_title("Batch size" + (f": no gain from {edge}" if edge else ""), loc="left", fontweight="bold")
    axes.set_xlabel("sequences decoded together")


def _by_draft_cost(axes: Axes, simulation: Simulation) -> None:
    scenario, edge = simulation.scenario, simulation.break_even_draft_cost
    top = max(1.2 * (edge or 0.0), 2 * scenario.costs.draft, 0.1)
    costs = [top * i / 60 for i in range(61)]
    scenarios = [replace(scenario, costs=replace(scenario.costs, draft=cost)) for cost in costs]
    lengths = [K for K in SHOWN_LENGTHS if K in scenario.lengths] or list(scenario.lengths)[:3]
    for i, K in enumerate(lengths):
        axes.plot(costs, [s.chain(K).speedup for s in scenarios], color=colour(i), linewidth=1.4, label=f"K = {K}")
    axes.plot(costs, [s.best_chain().speedup for s in scenarios], color=INK, linewidth=2.4, label="best K")
    axes.plot([scenario.costs.draft], [scenario.best_chain().speedup], "o", color=INK, markersize=5)
    if edge is not None:
        axes.plot([edge], [1.0], "x", color=INK, markersize=7)
    title = "Cost of a draft pass" + (f": no gain from {edge:.2f}" if edge is not None else "")
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel("in plain steps (dot: here)")


def _by_nodes(axes: Axes, simulation: Simulation) -> None:
    scenario, lengths = simulation.scenario, sorted(simulation.scenario.lengths)
    axes.plot(lengths, [scenario.chain(K).speedup for K in lengths], color=colour(0), linewidth=1.6, label="chain")
    static = simulation.static_trees
    axes.plot([s.nodes for s in static], [s.speedup for s in static], color=colour(1), linewidth=1.6, label="static tree")
    full = [s for s in simulation.trees if s.name.endswith("-ary tree")]
    axes.plot([s.nodes for s in full], [s.speedup for s in full], "s", color=colour(2), label=full[0].name if full else None)
    axes.set_title("Trees", loc="left", fontweight="bold")
    axes.set_xlabel("drafted nodes")


def _own(simulation: Simulation) -> str:
    if simulation.measured is None:
        return f"acceptance {simulation.scenario.alpha_K[0]:g} (here)"
    change = "" if simulation.change is None else f" {simulation.change:+g}"
    return f"{simulation.measured.name.split('/')[-1]}{change}"
