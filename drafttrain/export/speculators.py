"""What speculators' layouts of all families share: the header (the algorithm, its proposals, the target), and its fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from drafttrain.export.external import ExternalCheckpoint
from drafttrain.export.files import ExportSource

VERSION = "0.9.0"
INNER, TYPE = "transformer_layer_config", "speculators_model_type"  # keys of its configurations


def speculators_type(kind: str) -> Callable[[ExternalCheckpoint], bool]:
    """Recognises speculators' layout of this type."""
    return lambda checkpoint: checkpoint.config.get(TYPE) == kind


def header(source: ExportSource, algorithm: str, architecture: str) -> dict[str, Any]:
    """The shared fields. `model_type` is only in the layers' own configuration."""
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
