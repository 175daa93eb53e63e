"""Dimensions of a target and of a drafter's own layers. No torch: composing a configuration reads this."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from drafttrain.core.errors import UserError

SCALINGS = {  # of rotary positions: kind -> the numbers it needs
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True, slots=True)
class TargetShape:
    """The dimensions a drafter is built from."""

    vocab_size: int
    hidden_size: int
    blocks: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int
    rope_theta: float
    norm_eps: float


@dataclass(frozen=True, slots=True)
class LayerShape(TargetShape):
    """The dimensions of a drafter's own decoder layers."""

    rope_scaling: dict[str, Any] | None = None  # of rotary positions, in transformers' form; None: none, whatever the target's


@dataclass
class LayerOptions:
    """Dimensions of a drafter's own decoder layers; null: the target's. Published drafters often have another rope_theta."""

    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    rope_theta: float | None = None
    norm_eps: float | None = None
    rope_scaling: Any = None  # {rope_type: linear or llama3, factor: ..., ...}; null: none. Any: Hydra fills no null mapping

    @staticmethod
    def of(given: LayerOptions | Mapping[str, Any]) -> LayerOptions:
        """From LayerOptions or a checkpoint's plain data. Raises UserError for an unknown setting."""
        if isinstance(given, LayerOptions):
            return given
        known = [f.name for f in fields(LayerOptions)]
        unknown = sorted(given.keys() - set(known))
        if unknown:
            raise UserError(f"drafter.layer has no setting {', '.join(unknown)}; it has {', '.join(known)}")
        return LayerOptions(**given)

    @staticmethod
    def between(shape: TargetShape | None, target: TargetShape) -> LayerOptions:
        """The options that give this shape for this target."""
        if shape is None:
            return LayerOptions()
        apart = {
            f.name: getattr(shape, f.name)
            for f in fields(LayerOptions)
            if f.name != "rope_scaling" and getattr(shape, f.name) != getattr(target, f.name)
        }
        return LayerOptions(**apart, rope_scaling=shape.rope_scaling if isinstance(shape, LayerShape) else None)

    def shape(self, target: TargetShape) -> LayerShape:
        """The layers' dimensions. Raises UserError for values that no layer can have."""
        check_scaling(self.rope_scaling)
        own = {name: value for name, value in asdict(self).items() if value is not None}
        shape = LayerShape(**asdict(target) | own)
        for name in set(own) - {"rope_scaling"}:
            if own[name] <= 0:
                raise UserError(f"drafter.layer.{name} is {own[name]}; set it above 0, or to null: as the target's")
        if shape.heads % shape.kv_heads or shape.head_dim % 2:
            raise UserError(
                f"drafter.layer has {shape.heads} heads of width {shape.head_dim} over {shape.kv_heads} KV heads; choose an "
                "even width, and KV heads that divide the heads"
            )
        return shape


def check_scaling(scaling: Mapping[str, Any] | None) -> None:
    """Raise UserError for a scaling of positions that these layers do not have."""
    if scaling is None:
        return
    kind = str(scaling.get("rope_type", "default"))
    if kind not in SCALINGS:
        raise UserError(f"rope_scaling is of the type {kind!r}; layers of drafters know {', '.join(SCALINGS)}")
    lacking = [name for name in SCALINGS[kind] if not isinstance(scaling.get(name), int | float)]
    if lacking:
        raise UserError(f"rope_scaling of the type {kind} lacks {', '.join(lacking)}; add numbers for them")
