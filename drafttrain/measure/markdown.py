"""report.md: the measurement as text and tables, next to published figures. `render` writes pages in HTML."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from drafttrain.decoding.guards import JSON, LOOP, QUALITY
from drafttrain.measure import cells
from drafttrain.measure.cells import rows
from drafttrain.measure.engine_report import during_training, flags, section
from drafttrain.measure.flags import best_entry

ASSETS = Path(__file__).parents[1] / "assets"


def render(template: str, **values: Any) -> str:
    """A page as a single HTML file that works offline, from a template of `assets/`.

    A template may include other files of that folder. Values are escaped.
    """
    loader = jinja2.FileSystemLoader(ASSETS)
    return (
        jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
        .get_template(template)
        .render(values)
    )


def script_json(value: Any) -> str:
    """JSON that is safe inside a <script> element: it cannot end the element or open a comment."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")


Report = dict[str, Any]

_RATES = "tokens/s: speculative / plain / transformers"
_ALT = {
    "acceptance.png": "Acceptance by position",
    "speedup.png": "Speedup by batch size",
    "training.png": "Training curves",
    "data.png": "Lengths of rows, and coverage of a draft vocabulary",
}
COUNTS = {
    "records": "records read",
    "prepared": "records prepared by the end of training",
    "conversations": "usable conversations",
    "dropped": "dropped: no reply within the length",
    "rejected": "rejected: listed in rejected.txt",
    "truncated": "truncated",
    "documents": "texts",
    "tokens": "tokens",
    "supervised_tokens": "supervised tokens",
}


def markdown(report: Report, figures: Sequence[str]) -> str:
    """The whole text. figures: names of picture files in the same folder."""
    sections = [
        headline(report),
        _checkpoints(report),
        _flags(report),
        section(report),
        during_training(report),
        _change(report),
        *(f"![{_ALT.get(name, name)}]({name})" for name in figures),
        _costs(report),
        _slices(report),
        published_section(report),
        _quality(report),
        monitors_section(report),
        guards_section(report),
        _setup(report),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def headline(report: Report) -> str:
    """A title, and a paragraph on the best checkpoint."""
    entry = best_entry(report)
    text = f"# {report['drafter'].get('family', 'Drafter')}: tau {cells.number(entry['tau'])}"
    if entry["speedup"] is not None:
        text += f", {cells.speedups(entry)} the speed of plain decoding"
    text += f"\n\nBest checkpoint **{entry['name']}**"
    if entry.get("proposal"):
        two_proposals = entry.get("tuned") and any(e.get("tuned") is False for e in report["checkpoints"])
        text += f", which drafts as a {entry['proposal']}{', chosen for this machine' if two_proposals else ''}"
    text += f": {cells.number(entry['tau'])} tokens per target forward"
    text += f" over {entry['prompts']} prompts (policy {entry['policy']}, temperature {entry['temperature']:g})"
    if entry["exact_matches"] is not None:
        qualifier = " of the adapted target" if entry.get("target_change") else ""
        text += f"; greedy output identical to plain decoding{qualifier} for {cells.exact(entry)} of them"
    return text + ". Tokens and tau are deterministic; timings vary by machine. docs/metrics.md defines every term."


def _checkpoints(report: Report) -> str:
    header = ["checkpoint", "step", "tau", "expected tau", "alpha", "alpha by position", "rejected", "speedup [min-max]"]
    header += [_RATES, "exact"]
    body, differ = [], len({e.get("proposal") for e in report["checkpoints"]}) > 1
    for e in report["checkpoints"]:
        name = f"**{e['name']}**" if e["name"] == report["best"] else e["name"]
        line = [name, cells.count(e["step"]), cells.number(e["tau"]), cells.expected(e), cells.number(e["alpha"])]
        line += [cells.alphas(e), cells.share(e["rejection_overhead"]), cells.speedups(e), cells.rates(e), cells.exact(e)]
        body.append([*line, str(e.get("proposal"))] if differ else line)
    return "## Checkpoints\n\n" + rows([*header, "proposal"] if differ else header, body)


def _flags(report: Report) -> str:
    lines = [f"- **{e['name']}**: {flag}" for e in report["checkpoints"] for flag in e["flags"]]
    lines += [f"- {line}" for line in (*flags(report), *report["measure"]["notes"])]
    lines += [f"- {note}" for entry in report.get("engines") or [] for note in entry["notes"]]
    return "## To note\n\n" + "\n".join(lines) if lines else ""


def _change(report: Report) -> str:
    """The effect of training on adapted targets."""
    header = ["checkpoint", "plain outputs changed", "original's outputs: original / adapted"]
    header += ["adapted's outputs: original / adapted", "perplexity: original / adapted", "parameters", "MiB added"]
    body = []
    for e in report["checkpoints"]:
        if (c := e.get("target_change")) is None:
            continue
        line = [e["name"], f"{c['changed']}/{c['prompts']}"]
        for key in ("original_outputs", "adapted_outputs", "perplexity"):
            line.append(" / ".join(cells.number(c[key][target], 3) for target in ("original", "adapted")))
        body.append([*line, f"{c['parameters']:,}", cells.number(c["mib"], 1)])
    if not body:
        return ""
    summary = (
        "The target was trained too. An adapted target verifies the drafts, and **its output is not that of the original**. "
        "Speed, tau and exactness are relative to plain decoding of the adapted target. Outputs: mean log-likelihood of greedy "
        "outputs in nats per token, under each target. Perplexity: of held-out replies."
    )
    return f"## Change of the target\n\n{summary}\n\n" + rows(header, body)


def _costs(report: Report) -> str:
    timed = [e for e in report["checkpoints"] if e["draft_cost"] is not None]
    if not timed:
        return ""
    header = ["checkpoint", "draft ms", "verify ms", "commit ms", "host ms", "plain step ms", "draft / plain", "verify / plain"]
    header += ["nodes", "predicted speedup", "TTFT ms (plain)", "TPOT ms (plain)", "memory floor"]
    body = []
    for e in timed:
        line = [e["name"]] + [cells.number(e[k]) for k in ("draft_ms", "verify_ms", "commit_ms", "host_ms", "plain_step_ms")]
        line += [cells.number(e[k]) for k in ("draft_cost", "verify_cost")] + [cells.number(e["verify_nodes"], 1)]
        line += [cells.number(e.get("predicted_speedup"))]
        line += [cells.with_plain(e, k) for k in ("ttft_ms", "tpot_ms")]
        body.append([*line, cells.share(e["floor_fraction"])])
    caption = "Milliseconds per decode step (draft, verify, commit, host), at the first batch size. Nodes include the root."
    return f"## Cost of a decode step\n\n{caption}\n\n" + rows(header, body)


def _slices(report: Report) -> str:
    header = ("slice", "prompts", "tau", "expected tau", "alpha", "speedup [min-max]", _RATES, "exact")
    sections = []
    for e in report["checkpoints"]:
        differ = len({s["proposal"] for s in e["slices"] if "proposal" in s}) > 1
        sections.append(f"### {e['name']}\n\n" + rows(header, [_slice(s, differ) for s in e["slices"]]))
    return "## Slices\n\n" + "\n\n".join(sections)


def _slice(s: dict[str, Any], with_proposal: bool) -> list[str]:
    value = f"{s['value']:,}" if s["by"] == "context" else s["value"]
    name = f"{s['by'].replace('_', ' ')} {value}"
    if with_proposal and "proposal" in s:
        name += f": {s['proposal']}"
    figures = [cells.tau(s), cells.expected(s), cells.number(s["alpha"])]
    return [name, str(s["prompts"]), *figures, cells.speedups(s), cells.rates(s), cells.exact(s)]


def _quality(report: Report) -> str:
    header = ["checkpoint", "identical to plain", "to transformers", "explained by rounding", "unexplained", "sampling p-value"]
    header += ["log-likelihood change", "loops (plain)", "no stop token (plain)", "longest repetition (plain)"]
    exactness = ("exact_matches", "transformers_exact_matches", "explained", "unexplained")
    body = []
    for e in report["checkpoints"]:
        m = e["monitors"]
        line = [e["name"]] + [cells.count(e[k]) for k in exactness]
        line += [cells.number(e["distribution_p_value"], 3), cells.number(e["quality_delta"], 3)]
        body.append(line + [f"{m[k]} ({m[f'baseline_{k}']})" for k in ("loops", "stop_misses", "longest_repeat")])
    return "## Quality\n\n" + rows(header, body)


def _setup(report: Report) -> str:
    training = {key: value for key, value in (report["training"] or {}).items() if key not in ("data", "engine")}
    sections = [data_section((report["training"] or {}).get("data"))]
    for title, values in (("Target", report["target"]), ("Drafter", report["drafter"]), ("Training", training)):
        if values:
            lines = "\n".join(f"- {key}: {_plain(value)}" for key, value in values.items())
            sections.append(f"## {title}\n\n{lines}")
    measure_settings = {k: v for k, v in report["measure"].items() if k not in ("notes", "decode", "seconds")}
    measure = measure_settings | report["measure"]["decode"]
    sections.append("## Settings\n\n" + "\n".join(f"- {key}: {_plain(value)}" for key, value in measure.items()))
    sections[-1] += f"\n- measured in {report['measure']['seconds']:.0f} s"
    lines = "\n".join(f"- {key}: {_plain(value)}" for key, value in report["environment"].items())
    return "\n\n".join([*filter(None, sections), f"## Environment\n\n{lines}"])


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{k} {_plain(v)}" for k, v in value.items())
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def data_section(data: dict[str, Any] | None) -> str:
    """The section of report.md; empty without training, and for old reports without data sources."""
    if not data or "sources" not in data:
        return ""
    counts = [[label, cells.count(data[key])] for key, label in COUNTS.items()]
    counts += [["supervised share of tokens", cells.share(data["supervised_fraction"])]]
    if packing := data.get("packing"):
        counts += [
            ["packed rows", cells.count(packing["rows"])],
            ["share of a packed row in use", f"{packing['efficiency']:.1%}"],
        ]
    sections = [f"## Data\n\nFrom `{data['path']}`.", rows(("", "count"), counts), _sources(data), _lengths(data)]
    extra_sections = [
        _vocabulary(data.get("vocabulary")),
        _origin(data.get("origin")),
        _contamination(data.get("contamination")),
    ]
    return "\n\n".join(text for text in [*sections, *extra_sections] if text)


def _sources(data: dict[str, Any]) -> str:
    body = []
    for source in data["sources"]:
        forms = ", ".join(f"{form} {count:,}" for form, count in source["forms"].items())
        weight = cells.MISSING if source["weight"] is None else f"{source['weight']:g}"
        figures = [cells.count(source[key]) for key in ("records", "conversations", "supervised_tokens")]
        commit = f" at {source['commit'][:12]}" if source.get("commit") else ""
        body.append([f"{source['path']}{commit}", forms, weight, *figures])
    return rows(("source", "recognised", "weight", "records", "conversations", "supervised tokens"), body)


def _lengths(data: dict[str, Any]) -> str:
    edges, counts = zip(*data["lengths"], strict=True)
    return rows(("length in tokens, up to", *map(cells.count, edges)), [("texts", *map(cells.count, counts))])


def _vocabulary(vocabulary: dict[str, Any] | None) -> str:
    if not vocabulary:
        return ""
    sizes, shares = zip(*vocabulary["curve"], strict=True)
    summary = (
        f"{vocabulary['seen']:,} of {vocabulary['vocabulary']:,} tokens of the vocabulary are ever supervised. The recommended "
        f"draft vocabulary has the {vocabulary['recommended']:,} most frequent tokens and covers "
        f"{vocabulary['recommended_share']:.2%} of the supervised tokens:"
    )
    table = rows(("most frequent tokens", *map(cells.count, sizes)), [("covered", *(f"{s:.1%}" for s in shares))])
    return f"{summary}\n\n{table}"


def _origin(origin: dict[str, Any] | None) -> str:
    if not origin:
        return ""
    author = (
        "The target wrote the replies."
        if origin["own"]
        else f"The target may not have written the replies: {origin['reason']}."
    )
    if origin["log_likelihood"] is None:
        return author
    data_ll, target_ll = origin["log_likelihood"], origin["own_log_likelihood"]
    return (
        f"{author} Mean log-likelihood under the target, over {origin['replies']} replies: {data_ll:.2f} nats/token for the "
        f"data, {target_ll:.2f} for the target's own replies to the same prompts at temperature 1. A drafter learns most from "
        "replies like the target's own: if the data is far below, let `drafttrain prepare` write them."
    )


def _contamination(contamination: dict[str, Any] | None) -> str:
    if not contamination:
        return ""
    copies_text = (
        f"{len(contamination['copies'])} of {contamination['prompts']} evaluation prompts also occur in the training data"
    )
    rule = f"{contamination['overlap']:.0%} or more of their {contamination['ngram']}-word sequences in one conversation"
    summary = f"{copies_text} ({rule}; {contamination['searched']:,} of {contamination['records']:,} records were searched)."
    copy_rows = [
        [copy["question_id"], copy["category"], f"{copy['share']:.0%}", copy["origin"]] for copy in contamination["copies"][:20]
    ]
    return summary + ("\n\n" + rows(("prompt", "category", "found", "in"), copy_rows) if copy_rows else "")


def guards_section(report: dict[str, Any]) -> str:
    """The section of report.md on guards; empty if no guard was on."""
    entries = [e for e in report["checkpoints"] if e.get("guards")]
    if not entries:
        return ""
    header = ["checkpoint", "policy", "category", "prompts", "actions on loops", "actions on JSON"]
    acted, quality = [], []
    for e in entries:
        for category in e["guards"]["categories"]:
            counts = [str(category[key]) for key in ("prompts", LOOP, JSON)]
            acted.append([e["name"], e["policy"], category["category"], *counts])
        for guard_state in ("with", "without"):
            figures = e["guards"][guard_state]
            counts = [cells.count(figures[key]) for key in (*QUALITY, "tokens")]
            quality.append([e["name"], guard_state, *counts, cells.number(figures["log_likelihood"], 3)])
    guard = entries[0]["guards"]
    actions = f"On a loop: {guard[LOOP]['action']}. On broken JSON: {guard[JSON]['action']}."
    lower = ["checkpoint", "guards", "loops", "no stop token", "longest repetition", "valid JSON", "tokens"]
    lower += ["log-likelihood per token"]
    return f"## Guards\n\n{actions}\n\n" + cells.rows(header, acted) + "\n\n" + cells.rows(lower, quality)


def monitors_section(report: dict[str, Any]) -> str:
    """The section of report.md on monitors, by category. Categories with zero counts are left out."""
    body = []
    for e in report["checkpoints"]:
        for category in e["monitors"].get("categories", ()):
            if (
                not any(category[f"{prefix}{key}"] for prefix in ("", "baseline_") for key in QUALITY)
                and not category["json_prompts"]
            ):
                continue
            pairs = [f"{cells.count(category[k])} ({cells.count(category[f'baseline_{k}'])})" for k in QUALITY]
            json_prompts = cells.count(category["json_prompts"] or None)
            body.append(
                [e["name"], e["policy"], category["category"], str(category["prompts"]), *pairs[:3], json_prompts, pairs[3]]
            )
    if not body:
        return ""
    header = ["checkpoint", "policy", "category", "prompts", "loops (plain)", "no stop token (plain)"]
    header += ["longest repetition (plain)", "asked for JSON", "valid JSON (plain)"]
    return "## Monitors by category\n\n" + cells.rows(header, body)


PUBLISHED = Path(__file__).parent / "published.json"
CAUTION = "Target, hardware and engine differ: compare only the order of magnitude."


def published_for(report: dict[str, Any], sets: set[str | None]) -> list[dict[str, Any]]:
    """The report's `published`: figures published for the same family and public prompt set, next to those measured.

    The measured ones are the best checkpoint's. sets: the public sets that the prompts are from; None for other prompts.
    """
    best = best_entry(report)
    measured = {entry["value"]: entry for entry in best["slices"] if entry["by"] == "set"} or dict.fromkeys(sets, best)
    drafter, published = report["drafter"], []
    for figure in json.loads(PUBLISHED.read_text(encoding="utf-8")):
        options = figure["options"].items()
        if figure["family"] != drafter.get("family") or figure["set"] not in measured:
            continue
        if any((drafter.get("options") or {}).get(key) != value for key, value in options):
            continue
        ours = measured[figure["set"]]
        selected = {key: figure[key] for key in ("set", "method", "target", "hardware", "tau", "speedup", "source")}
        published.append(selected | {"measured_tau": ours["tau"], "measured_speedup": ours["speedup"]})
    return published


def published_lines(report: dict[str, Any]) -> list[str]:
    """Lines for the console, one per published figure."""
    lines = [
        f"{p['set']}: tau {cells.number(p['measured_tau'])}, speedup {cells.number(p['measured_speedup'])}; published for "
        f"{p['method']}: {p['tau']:.2f}, {p['speedup']:.2f} ({p['target']}, {p['hardware']})"
        for p in report.get("published") or ()
    ]
    return [*lines, CAUTION] if lines else []


def published_section(report: dict[str, Any]) -> str:
    """The section of report.md; empty without published figures."""
    published = report.get("published") or []
    if not published:
        return ""
    header = ["set", "tau here", "speedup here", "published for", "tau", "speedup", "target", "hardware", "source"]
    body = [
        [
            *(p["set"], cells.number(p["measured_tau"]), cells.number(p["measured_speedup"]), p["method"]),
            *(cells.number(p["tau"]), cells.number(p["speedup"]), p["target"], p["hardware"], p["source"]),
        ]
        for p in published
    ]
    return f"## Published figures\n\n{CAUTION}\n\n" + cells.rows(header, body)
