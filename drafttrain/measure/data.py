"""Floor 4: the report's section on the training data."""

from __future__ import annotations

from typing import Any

from drafttrain.measure import cells
from drafttrain.measure.cells import rows

COUNTS = {
    "records": "records read",
    "prepared": "of them prepared by the end of training",
    "conversations": "usable conversations",
    "dropped": "dropped: no reply within the length",
    "rejected": "rejected: listed in rejected.txt",
    "truncated": "truncated",
    "documents": "texts",
    "tokens": "tokens",
    "supervised_tokens": "supervised tokens",
}


def data_section(data: dict[str, Any] | None) -> str:
    """Empty where nothing was trained, and for a report of before there were sources."""
    if not data or "sources" not in data:
        return ""
    counts = [[said, cells.count(data[key])] for key, said in COUNTS.items()]
    counts += [["supervised share of tokens", cells.share(data["supervised_fraction"])]]
    if packing := data.get("packing"):
        counts += [["packed rows", cells.count(packing["rows"])], ["how full they are", f"{packing['efficiency']:.1%}"]]
    parts = [f"## Data\n\nFrom `{data['path']}`.", rows(("", "count"), counts), _sources(data), _lengths(data)]
    return "\n\n".join(part for part in [*parts, _vocabulary(data.get("vocabulary"))] if part)


def _sources(data: dict[str, Any]) -> str:
    body = []
    for source in data["sources"]:
        forms = ", ".join(f"{form} {count:,}" for form, count in source["forms"].items())
        weight = cells.MISSING if source["weight"] is None else f"{source['weight']:g}"
        figures = [cells.count(source[key]) for key in ("records", "conversations", "supervised_tokens")]
        body.append([source["path"], forms, weight, *figures])
    return rows(("source", "recognised", "weight", "records", "conversations", "supervised tokens"), body)


def _lengths(data: dict[str, Any]) -> str:
    edges, counts = zip(*data["lengths"], strict=True)
    return rows(("at most so many tokens", *map(cells.count, edges)), [("texts", *map(cells.count, counts))])


def _vocabulary(vocabulary: dict[str, Any] | None) -> str:
    if not vocabulary:
        return ""
    sizes, shares = zip(*vocabulary["curve"], strict=True)
    said = (
        f"{vocabulary['seen']:,} of {vocabulary['vocabulary']:,} tokens are ever supervised. A draft vocabulary of the "
        f"{vocabulary['recommended']:,} commonest, which is recommended, covers {vocabulary['recommended_share']:.2%} of them:"
    )
    return f"{said}\n\n" + rows(("commonest tokens", *map(cells.count, sizes)), [("covered", *(f"{s:.1%}" for s in shares))])
