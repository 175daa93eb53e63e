"""The report's section on the training data."""

from __future__ import annotations

from typing import Any

from drafttrain.measure import cells
from drafttrain.measure.cells import rows

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
    parts = [f"## Data\n\nFrom `{data['path']}`.", rows(("", "count"), counts), _sources(data), _lengths(data)]
    more = [_vocabulary(data.get("vocabulary")), _origin(data.get("origin")), _contamination(data.get("contamination"))]
    return "\n\n".join(part for part in [*parts, *more] if part)


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
    data, own = origin["log_likelihood"], origin["own_log_likelihood"]
    return (
        f"{author} Mean log-likelihood under the target, over {origin['replies']} replies: {data:.2f} nats/token for the data, "
        f"{own:.2f} for the target's own replies to the same prompts at temperature 1."
    )


def _contamination(found: dict[str, Any] | None) -> str:
    if not found:
        return ""
    copied = f"{len(found['copies'])} of {found['prompts']} evaluation prompts also occur in the training data"
    rule = f"{found['overlap']:.0%} or more of their {found['ngram']}-word sequences in one conversation"
    summary = f"{copied} ({rule}; {found['searched']:,} of {found['records']:,} records were searched)."
    listed = [[copy["question_id"], copy["category"], f"{copy['share']:.0%}", copy["origin"]] for copy in found["copies"][:20]]
    return summary + ("\n\n" + rows(("prompt", "category", "found", "in"), listed) if listed else "")
