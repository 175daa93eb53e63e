"""What speculators' configurations share, whatever the family: the algorithm, how it proposes, and for which target."""

from __future__ import annotations

from typing import Any

from drafttrain.export.files import Source

VERSION = "0.9.0"


def header(source: Source, algorithm: str, architecture: str) -> dict[str, Any]:
    """There is no `model_type` outside the layers' own configuration."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": source.drafter.draft_length,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": [architecture],
        "speculators_model_type": algorithm,
        "speculators_version": VERSION,
        "tie_word_embeddings": False,
        "torch_dtype": source.dtype,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": source.target_name, "architectures": [source.target_architecture]},
        },
    }
