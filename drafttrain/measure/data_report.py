"""The report's section on the training data."""

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
    more = [_vocabulary(data.get("vocabulary")), _origin(data.get("origin")), _contamination(data.get("contamination"))]
    return "\n\n".join(part for part in [*parts, *more] if part)


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


def _origin(origin: dict[str, Any] | None) -> str:
    if not origin:
        return ""
    whose = "the target's own" if origin["own"] else f"not known to be the target's: {origin['reason']}"
    if origin["log_likelihood"] is None:
        return f"The replies are {whose}."
    likely, own = origin["log_likelihood"], origin["own_log_likelihood"]
    return (
        f"The replies are {whose}. The target's log-likelihood of {origin['replies']} of them is {likely:.2f} nats/token, of "
        f"replies that it writes to the same prompts at temperature 1 {own:.2f}."
    )


def _contamination(found: dict[str, Any] | None) -> str:
    if not found:
        return ""
    copied = f"{len(found['copies'])} of {found['prompts']} evaluation prompts stand in the training data"
    sought = f"{found['overlap']:.0%} or more of their {found['ngram']}-word sequences in one conversation"
    said = f"{copied} ({sought}; {found['searched']:,} of {found['records']:,} records were searched)."
    listed = [[copy["question_id"], copy["category"], f"{copy['share']:.0%}", copy["origin"]] for copy in found["copies"][:20]]
    return said + ("\n\n" + rows(("prompt", "category", "found", "in"), listed) if listed else "")
