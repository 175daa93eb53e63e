"""DSpark: speculators' layout. The calibration of its confidences is not exported, because no loader reads one."""

from __future__ import annotations

from drafttrain.export.files import Files, Source
from drafttrain.export.layouts.dflash import facts, speculators_config


def speculators(source: Source) -> Files:
    """speculators' layout."""
    heads = {
        "markov_rank": source.options["rank"],
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    return Files(speculators_config(source, "dspark", "DSparkSpeculator") | heads, source.tensors, facts=facts(source))
