"""The report's figures as PNG files, among them the training curves of a metrics.jsonl. Drawing needs no display."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a machine without matplotlib reads the curves
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVES = {
    "loss": "Loss",
    "agreement": "Top-1 agreement",
    "expected": "Tau: expected (chain) and measured",
}
TAUS = {
    "expected_tau": "expected tau",
    "measured_tau": "measured tau",
    "held_out": "expected tau, held-out conversations",
    "final": "measured tau, report",
}
ENGINE = "engine/"  # begins the keys of a serving engine's figures
SAME_CHAINS = "our tau, same chains"  # mostly equal to the engine's
Series = dict[str, list[tuple[float, float]]]


def read_curves(metrics: Path | None, entries: Sequence[dict[str, Any]] = ()) -> dict[str, Series]:
    """The training curves of a metrics.jsonl that have points, by a name of `CURVES`; empty without a file.

    entries: checkpoints of a report, whose tau is added.
    """
    lines = _lines(metrics)
    if lines:
        entries = [entry for entry in entries if entry.get("step") is not None and entry.get("tuned", True)]
        lines += [
            {"step": e["step"], "held_out": (e.get("training") or {}).get("held_out_tau"), "final": e["tau"]} for e in entries
        ]
    curves = {
        "loss": _series(lines, {"loss": "loss"}),
        "agreement": _agreement(lines),
        "expected": _series(lines, TAUS) | _by_engine(metrics),
    }
    return {name: series for name, series in curves.items() if series}


def engine_steps(metrics: Path | None) -> list[dict[str, Any]]:
    """The measurements of a serving engine during training, by step, with our own tau of the step (`measured_tau`)."""
    lines = _lines(metrics)
    ours = {line["step"]: line["measured_tau"] for line in lines if "measured_tau" in line}
    by_step = {line[f"{ENGINE}step"]: line for line in lines if f"{ENGINE}step" in line}
    return [
        {key.removeprefix(ENGINE): value for key, value in line.items() if key.startswith(ENGINE)}
        | {"measured_tau": ours.get(step)}
        for step, line in sorted(by_step.items())
    ]


def _by_engine(metrics: Path | None) -> Series:
    """The tau of an engine during training, and that of our decoder with the same chains."""
    steps = engine_steps(metrics)
    names = {"tau": f"tau in {steps[-1]['name']}", "own_tau": SAME_CHAINS} if steps else {}
    return _series(steps, names)


def _lines(metrics: Path | None) -> list[dict[str, Any]]:
    text = metrics.read_text(encoding="utf-8") if metrics is not None and metrics.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def _agreement(lines: Sequence[dict[str, Any]]) -> Series:
    series: Series = {}
    for k in range(max((len(line.get("agreement") or ()) for line in lines), default=0)):
        points = [(line["step"], line["agreement"][k]) for line in lines if len(line.get("agreement") or ()) > k]
        if defined_points := [(float(x), float(y)) for x, y in points if y is not None]:
            series[f"position {k + 1}"] = defined_points
    return series


def _series(lines: Sequence[dict[str, Any]], names: dict[str, str]) -> Series:
    series: Series = {}
    for key, label in names.items():
        if points := [(float(x["step"]), float(x[key])) for x in lines if x.get(key) is not None]:
            series[label] = points
    return series


Entry = dict[str, Any]

COLOURS = ("#3b6fb6", "#e07b39", "#3f9e7a", "#b24c63", "#7d5ba6", "#8a8a8a")
MARKED = 20  # points of a curve from which they are not marked
INK, _GRID = "#333333", "#e3e3e3"


def acceptance_plot(entries: Sequence[Entry], path: Path) -> Path | None:
    """Draw acceptance by draft position, given that the earlier drafts were accepted, with 95 % intervals.

    None when nothing was drafted.
    """
    from matplotlib.ticker import MaxNLocator

    drafted = [e for e in entries if e["alpha_by_position"]]
    if not drafted:
        return None
    figure, (axes,) = panels(1, 6.4)
    for i, entry in enumerate(drafted):
        value, low, high = zip(*entry["alpha_by_position"], strict=True)
        positions = [position + 1 + 0.06 * (i - (len(drafted) - 1) / 2) for position in range(len(value))]
        spread = [[v - a for v, a in zip(value, low, strict=True)], [b - v for v, b in zip(value, high, strict=True)]]
        label = f"{entry['name']} (tau {entry['tau']:.2f})"
        axes.errorbar(
            positions, value, yerr=spread, marker="o", markersize=5, capsize=3, linewidth=1.6, color=colour(i), label=label
        )
    axes.set(xlabel="draft position", ylabel="acceptance, given the earlier positions", ylim=(0, 1))
    axes.set_title("Acceptance by position", loc="left", fontweight="bold")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.08)
    axes.legend(frameon=False)
    return save(figure, path)


def speedup_plot(entries: Sequence[Entry], path: Path) -> Path | None:
    """Draw speedup over plain decoding by checkpoint and batch size, with minimum and maximum of the repeats.

    None without timings.
    """
    timed = [(e["name"], [s for s in e["slices"] if s["by"] == "batch_size" and s["speedup"] is not None]) for e in entries]
    sizes = list(dict.fromkeys(s["value"] for _, slices in timed for s in slices))
    if not sizes:
        return None
    figure, (axes,) = panels(1, max(5.0, 1.6 + 0.9 * len(sizes) * len(entries)))
    width = 0.8 / len(timed)
    for i, (name, slices) in enumerate(timed):
        bar_x = [sizes.index(s["value"]) + (i - (len(timed) - 1) / 2) * width for s in slices]
        value = [s["speedup"] for s in slices]
        spread = [[s["speedup"] - s["speedup_min"] for s in slices], [s["speedup_max"] - s["speedup"] for s in slices]]
        axes.bar(bar_x, value, width * 0.88, color=colour(i), label=name)
        axes.errorbar(bar_x, value, yerr=spread, fmt="none", ecolor=INK, elinewidth=1.2, capsize=4)
        for x, s in zip(bar_x, slices, strict=True):
            at_top, text = (x, s["speedup_max"]), f"{s['speedup']:.2f}x"
            axes.annotate(text, at_top, (0, 4), textcoords="offset points", ha="center", fontsize=9)
    axes.axhline(1.0, color=INK, linewidth=1, linestyle="--", label="plain decoding")
    axes.set_xticks(range(len(sizes)), [f"batch {size}" for size in sizes])
    axes.set_ylim(0, 1.22 * max([1.0, *(s["speedup_max"] for _, slices in timed for s in slices)]))
    axes.set_ylabel("speedup (time per token)")
    axes.set_title("Speedup over plain decoding", loc="left", fontweight="bold")
    axes.grid(axis="x", visible=False)
    axes.legend(frameon=False, ncols=3, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.1))
    return save(figure, path)


def training_plot(metrics: Path, path: Path, entries: Sequence[Entry] = ()) -> Path | None:
    """Draw loss, agreement by position and tau over the steps of a metrics.jsonl; None when it has no step.

    entries: as for `read_curves`.
    """
    curves = read_curves(metrics, entries)
    if not curves:
        return None
    figure, panel_axes = panels(len(curves), 4.2 * len(curves))
    for axes, (name, series) in zip(panel_axes, curves.items(), strict=True):
        for i, (label, points) in enumerate(series.items()):
            style: dict[str, Any] = {"marker": "o" if len(points) < MARKED else None, "markersize": 4}
            if len(points) == 1:  # a ring is left where both points are the same
                style["markersize"] = 11 if label == TAUS["held_out"] else 6
            if label == SAME_CHAINS:  # the line that it may cover shows through
                style = {"linestyle": (0, (3, 3)), "marker": "o", "markersize": 8, "markerfacecolor": "none"}
            axes.plot(*zip(*points, strict=True), linewidth=1.6, color=colour(i), label=label, **style)
        axes.set_title(CURVES[name], loc="left", fontweight="bold")
        axes.set_xlabel("step")
        if len(series) > 1:
            axes.legend(frameon=False, fontsize=9)
    return save(figure, path)


def data_plot(data: Entry | None, path: Path) -> Path | None:
    """Draw the lengths of the training texts and the coverage by the most frequent tokens; None without the data."""
    if not data or not data.get("lengths"):
        return None
    vocabulary = data.get("vocabulary")
    figure, panel_axes = panels(2 if vocabulary else 1, 9.6 if vocabulary else 5.0)
    edges, counts = zip(*data["lengths"], strict=True)
    panel_axes[0].bar(range(len(edges)), counts, 0.88, color=colour(0))
    panel_axes[0].set_xticks(range(len(edges)), [f"{edge:,}" for edge in edges], rotation=45)
    panel_axes[0].set(xlabel="length in tokens, up to", ylabel="texts")
    panel_axes[0].set_title("Lengths", loc="left", fontweight="bold")
    panel_axes[0].grid(axis="x", visible=False)
    if vocabulary:
        size, share = vocabulary["recommended"], vocabulary["recommended_share"]
        panel_axes[1].plot(*zip(*vocabulary["curve"], strict=True), marker="o", markersize=4, linewidth=1.6, color=colour(0))
        panel_axes[1].plot([size], [share], marker="o", markersize=8, color=colour(1), linestyle="none")
        panel_axes[1].annotate(f"{size:,}: {share:.1%}", (size, share), (8, -14), textcoords="offset points", color=INK)
        panel_axes[1].set_xscale("log", base=2)
        panel_axes[1].set(xlabel="most frequent tokens", ylabel="share of supervised tokens", ylim=(0, 1.04))
        panel_axes[1].set_title("Coverage of a draft vocabulary", loc="left", fontweight="bold")
    return save(figure, path)


def tuning_plot(surface: Sequence[Entry], chosen: Entry, path: Path) -> Path | None:
    """Draw predicted speedup over plain decoding, and mark the chosen proposal if it is a predicted one; None without any.

    By nodes, with a line for each depth; by depth alone where the depth decides the nodes.
    """
    if not surface:
        return None
    depths = sorted({s["depth"] for s in surface})
    x_key = "depth" if len(depths) == len(surface) else "nodes"
    figure, (axes,) = panels(1, 7.2)
    lines = {None: surface} if x_key == "depth" else {d: [s for s in surface if s["depth"] == d] for d in depths}
    for i, (depth, points) in enumerate(lines.items()):
        x, y = zip(*sorted((s[x_key], s["speedup"]) for s in points), strict=True)
        label = None if depth is None else f"depth {depth}"
        axes.plot(x, y, marker="o", markersize=4, linewidth=1.6, color=colour(i), label=label)
    depth, nodes = chosen["settings"].get("draft_length"), len(chosen["settings"].get("paths", ())) or None
    if marked := [s for s in surface if s["depth"] == depth and nodes in (None, s["nodes"])]:  # none: as trained, as stored
        point = (marked[0][x_key], marked[0]["speedup"])
        axes.plot(*point, marker="o", markersize=11, markerfacecolor="none", color=INK, linestyle="none")
        axes.annotate("chosen", point, (8, 8), textcoords="offset points", color=INK)
    axes.axhline(1.0, color=INK, linewidth=1, linestyle="--")
    label = "draft length" if x_key == "depth" else "nodes of the tree"
    axes.set(xlabel=label, ylabel="predicted speedup over plain decoding")
    axes.set_title("Predicted speedup by proposal", loc="left", fontweight="bold")
    if x_key == "nodes":
        axes.legend(frameon=False, fontsize=9)
    return save(figure, path)


def race_plot(candidates: Sequence[tuple[str, Sequence[Entry]]], path: Path) -> Path | None:
    """Draw the predicted speedup of candidates by their training time, with intervals; None without a point.

    candidates: of each its name and points with `seconds`, `value`, `low` and `high`.
    """
    if not any(points for _, points in candidates):
        return None
    figure, (axes,) = panels(1, 7.2)
    for i, (name, points) in enumerate(candidates):
        if points:
            minutes, values = [point["seconds"] / 60 for point in points], [point["value"] for point in points]
            bounds = [[p["value"] - p["low"] for p in points], [p["high"] - p["value"] for p in points]]
            axes.errorbar(minutes, values, bounds, marker="o", capsize=3, linewidth=1.6, color=colour(i), label=name)
    axes.axhline(1.0, color=INK, linewidth=1, linestyle="--")
    axes.set(xlabel="minutes of training", ylabel="predicted speedup over plain decoding")
    axes.set_title("The race", loc="left", fontweight="bold")
    axes.legend(frameon=False, fontsize=9)
    return save(figure, path)


def colour(i: int) -> str:
    """The colour of the i-th series."""
    return COLOURS[i % len(COLOURS)]


def panels(count: int, width: float, columns: int | None = None, height: float = 3.9) -> tuple[Figure, list[Axes]]:
    """A figure of this size in inches, and its panels, row by row. columns: panels in a row; None: all."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    across = columns or count
    panel_axes = [figure.add_subplot(-(-count // across), across, i + 1) for i in range(count)]
    for axes in panel_axes:
        axes.grid(color=_GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color("#999999")
        axes.tick_params(colors=INK)
    return figure, panel_axes


def save(figure: Figure, path: Path) -> Path:
    """Write the figure atomically."""
    temporary_path = path.with_suffix(".aside.png")
    figure.savefig(temporary_path)
    temporary_path.replace(path)
    return path
