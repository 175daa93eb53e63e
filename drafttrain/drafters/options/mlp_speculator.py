"""The options of mlp_speculator."""

from __future__ import annotations

from dataclasses import dataclass

from drafttrain.drafters.common.options import TreeOptions


@dataclass
class MLPSpeculatorOptions(TreeOptions):
    """n_predict stages, each with embeddings, a projection, a norm and a head of its own, or all with one."""

    family: str = "mlp_speculator"
    n_predict: int = 3
    inner_dim: int | None = None  # of the states; null: the target's hidden size
    tie_weights: bool = False  # one set for all stages; the first projection stays apart where the widths differ
    scale_input: bool = False  # the target's state is brought to a root mean square of 1 / sqrt 2 first


OPTIONS = MLPSpeculatorOptions
