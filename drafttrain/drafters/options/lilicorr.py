"""The options of lilicorr."""

from __future__ import annotations

from dataclasses import dataclass

from drafttrain.drafters.common.options import BlockOptions


@dataclass
class LiLiCorrOptions(BlockOptions):
    family: str = "lilicorr"
    candidates: int = 8  # tokens of a slot that are scored: 2, 4, 8 or 16
    hidden_size: int = 1024  # of the corrector
    factor_dim: int = 1024  # of the vectors whose products are the scores
    corrector_layers: int = 2
    heads: int = 8
    mlp_ratio: float = 2.0
    logit_scale: float = 8.0  # scores are within this and its negative
    vector_eps: float = 1e-4  # smallest length that a vector is divided by
    ce_weight: float = 0.25  # of the true token's cross-entropy among the candidates
    penalty_weight: float = 0.25  # of the candidates' expected distance below the true token in the target's logits
    divergence_weight: float = 0.0  # of `loss` between the choice among the candidates and the target; 0: as published


OPTIONS = LiLiCorrOptions
