"""Dimensions of a target and of a drafter's own layers. No torch: composing a configuration reads this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from drafttrain.core.errors import UserError
from drafttrain.core.limits import above, at_least, check_limits

CONTEXT = "original_max_position_embeddings"
SCALINGS = {  # of rotary positions, as transformers names them: kind -> the fields that it needs
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", CONTEXT),
    "longrope": ("long_factor", "short_factor", CONTEXT),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", CONTEXT),
    "proportional": (),
}
MORE = {  # kind -> the fields that it may have
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("factor", "attention_factor"),
    "proportional": ("factor", "partial_rotary_factor"),
}
LISTS = ("long_factor", "short_factor")  # fields with one number for each pair of a head's values


# ranks and widths of latent attention, by transformers' names
LATENT_FIELDS = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
LATENT_WIDTHS = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}  # DeepSeek-V3's
# settings of drafters' layers that are not the target's
OWN = ("rope_scaling", "sliding_window", "full_attention_layers", "attention_sinks", *LATENT_FIELDS)


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
    sliding_window: int | None = None  # positions that a query sees at most, its own included; None: all
    full_attention_layers: tuple[int, ...] = ()  # layers without the window, from 0
    attention_sinks: bool = False  # each query head has a learnt score that takes its share of the softmax and adds nothing
    kv_lora_rank: int | None = None  # of latent attention, where head_dim is qk_rope_head_dim; None: ordinary attention
    q_lora_rank: int | None = None  # None: queries have no latent
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer, counted from 0; None: it sees all positions."""
        return None if layer in self.full_attention_layers else self.sliding_window

    def check_window(self, layers: int, drafts: int) -> None:
        """Raise UserError for windows that `layers` layers cannot have, or that are too narrow.

        drafts: the drafts of a path, or the steps of training on own outputs, whichever are more.
        """
        window, full = self.sliding_window, self.full_attention_layers
        if window is None:
            if full:
                raise UserError(
                    f"drafter.layer.full_attention_layers is {list(full)} without drafter.layer.sliding_window; set it"
                )
            return
        if window <= drafts + 1:
            raise UserError(
                f"drafter.layer.sliding_window is {window}; {drafts} drafts or training steps and the token before them must "
                f"fit: set it above {drafts + 1}"
            )
        if not all(0 <= layer < layers for layer in full):
            raise UserError(f"drafter.layer.full_attention_layers is {list(full)}; the drafter has layers 0 to {layers - 1}")


@dataclass
class LayerOptions:
    """Dimensions of a drafter's own decoder layers; null: the target's. Published drafters often have another rope_theta."""

    heads: int | None = at_least(None, 1)
    kv_heads: int | None = at_least(None, 1)
    head_dim: int | None = at_least(None, 1)
    intermediate_size: int | None = at_least(None, 1)
    rope_theta: float | None = above(None, 0)
    norm_eps: float | None = above(None, 0)
    rope_scaling: Any = None  # {rope_type: yarn, factor: ...}, as in transformers; null: none. Any: Hydra fills no null mapping
    sliding_window: int | None = at_least(None, 1)  # positions that a query sees at most, its own included; null: all
    full_attention_layers: list[int] = field(default_factory=list)  # layers without the window, from 0
    attention_sinks: bool = False  # each query head has a learnt score that takes its share of the softmax and adds nothing
    # latent attention (MLA, arXiv 2405.04434), in families that have it
    kv_lora_rank: int | None = at_least(None, 1)  # of keys and values; null: ordinary attention
    q_lora_rank: int | None = at_least(None, 1)  # of queries; null: they have no latent
    qk_nope_head_dim: int | None = at_least(None, 1)  # of a query and key, not rotated; null: 128
    qk_rope_head_dim: int | None = at_least(None, 2)  # of a query and key, rotated; null: 64
    v_head_dim: int | None = at_least(None, 1)  # of a value; null: 128

    @staticmethod
    def of(given: LayerOptions | Mapping[str, Any]) -> LayerOptions:
        """From LayerOptions or a checkpoint's plain data. Raises UserError for an unknown setting."""
        if isinstance(given, LayerOptions):
            return given
        valid_names = [f.name for f in fields(LayerOptions)]
        unknown = sorted(given.keys() - set(valid_names))
        if unknown:
            raise UserError(f"drafter.layer has no setting {', '.join(unknown)}; it has {', '.join(valid_names)}")
        return LayerOptions(**given)

    @staticmethod
    def between(shape: TargetShape | None, target: TargetShape) -> LayerOptions:
        """The options that give this shape for this target."""
        if shape is None:
            return LayerOptions()
        shared = [f.name for f in fields(LayerOptions) if f.name not in OWN]
        overrides = {name: getattr(shape, name) for name in shared if getattr(shape, name) != getattr(target, name)}
        if not isinstance(shape, LayerShape):
            return LayerOptions(**overrides)
        own = {name: getattr(shape, name) for name in OWN} | {"full_attention_layers": list(shape.full_attention_layers)}
        return LayerOptions(**overrides, **own)

    def shape(self, target: TargetShape, latent: bool = False) -> LayerShape:
        """The layers' dimensions. Raises UserError for values that no layer can have.

        latent: the family's layers can have latent attention.
        """
        check_limits("drafter.layer", self)
        check_scaling(self.rope_scaling, self.head_dim or target.head_dim)
        overrides = {name: value for name, value in asdict(self).items() if value is not None}
        overrides |= {"full_attention_layers": tuple(self.full_attention_layers), **self._latent(target, latent)}
        shape = LayerShape(**asdict(target) | overrides)
        if shape.heads % shape.kv_heads or shape.head_dim % 2:
            raise UserError(
                f"drafter.layer has {shape.heads} heads of width {shape.head_dim} over {shape.kv_heads} KV heads; choose an "
                "even width, and KV heads that divide the heads"
            )
        return shape

    def _latent(self, target: TargetShape, allowed: bool) -> dict[str, Any]:
        """What latent attention determines of the dimensions; empty without it. Raises UserError for what it cannot have."""
        given = {name: value for name in LATENT_FIELDS if (value := getattr(self, name)) is not None}
        if not given:
            return {}
        if not allowed or self.kv_lora_rank is None:
            remedy = "set drafter.layer.kv_lora_rank" if allowed else "this family has ordinary attention: leave it out"
            raise UserError(f"drafter.layer has {', '.join(given)}, of latent attention; {remedy}")
        widths = LATENT_WIDTHS | given
        implied = {"kv_heads": self.heads or target.heads, "head_dim": widths["qk_rope_head_dim"], "sliding_window": None}
        implied["attention_sinks"] = False
        for name, value in implied.items():
            if getattr(self, name) not in (None, value):
                raise UserError(
                    f"drafter.layer.{name} is {getattr(self, name)} with latent attention, where it can only be "
                    f"{'null' if value is None else value}; leave it out"
                )
        check_latent_scaling(self.rope_scaling or {})
        return widths | implied


def check_latent_scaling(scaling: Mapping[str, Any]) -> None:
    """Raise UserError for a scaling that engines do not have in latent attention: theirs is DeepSeek's yarn."""
    has_mscale = [name for name in ("mscale", "mscale_all_dim") if scaling.get(name) is not None]
    unread = [name for name in ("attention_factor", "truncate") if scaling.get(name) is not None]
    if scaling.get("rope_type", "default") not in ("default", "yarn") or unread or len(has_mscale) == 1:
        raise UserError(
            f"rope_scaling is {dict(scaling)}; in latent attention engines know yarn alone, without attention_factor and "
            "truncate, and with both of mscale and mscale_all_dim or neither"
        )


def scaling_fields(kind: str) -> tuple[str, ...]:
    """All fields that a kind of scaling can have."""
    return SCALINGS.get(kind, ()) + MORE.get(kind, ())


def check_scaling(scaling: Mapping[str, Any] | None, head_dim: int | None = None) -> None:
    """Raise UserError for a scaling of positions that these layers do not have. head_dim: None where it is not known."""
    if scaling is None:
        return
    if not isinstance(scaling, Mapping):
        raise UserError(f"rope_scaling is {scaling!r}; an object is needed, such as {{rope_type: linear, factor: 2}}")
    rope_type = str(scaling.get("rope_type", "default"))
    if rope_type not in SCALINGS:
        raise UserError(f"rope_scaling is of the type {rope_type!r}; layers of drafters know {', '.join(SCALINGS)}")
    valid_fields = scaling_fields(rope_type)
    unknown = sorted(set(scaling) - {*valid_fields, "rope_type"})
    if unknown:
        raise UserError(
            f"rope_scaling of the type {rope_type} has no {', '.join(unknown)}; it has {', '.join(valid_fields) or 'nothing'}"
        )
    missing = [name for name in SCALINGS[rope_type] if not _numeric(name, scaling.get(name))]
    if missing:
        raise UserError(f"rope_scaling of the type {rope_type} lacks {', '.join(missing)}; add numbers for them")
    invalid = [name for name in valid_fields if scaling.get(name) is not None and not _numeric(name, scaling[name])]
    if invalid:
        raise UserError(f"rope_scaling's {invalid[0]} is {scaling[invalid[0]]!r}; numbers above 0 are needed")
    if head_dim is None:
        return
    lists = [name for name in LISTS if name in valid_fields and len(scaling[name]) != head_dim // 2]
    if lists:
        raise UserError(
            f"rope_scaling's {lists[0]} has {len(scaling[lists[0]])} numbers; heads of width {head_dim} need {head_dim // 2}"
        )


def _numeric(name: str, value: Any) -> bool:
    if name == "truncate":
        return isinstance(value, bool)
    numbers = value if name in LISTS else [value]
    is_sequence = isinstance(numbers, Sequence) and not isinstance(numbers, str)
    return is_sequence and all(isinstance(x, int | float) and not isinstance(x, bool) and x > 0 for x in numbers)
