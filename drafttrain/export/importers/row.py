"""The description of one importable layout, and checks against the target: sizes, embedding, output matrix."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from drafttrain.core.errors import UserError
from drafttrain.export.importers.directory import Foreign
from drafttrain.export.layouts.renames import SAME, Renames
from drafttrain.model.shapes import CONTEXT, LayerOptions, LayerShape, check_scaling, scaling_fields
from drafttrain.model.target import Target
from drafttrain.targets.shallow import final_norm
from drafttrain.targets.structure import shape_of

EMBEDDING, HEAD, NORM = "embedding", "output matrix", "last norm"
INNER, TYPE = "transformer_layer_config", "speculators_model_type"  # keys of speculators' configurations
KINDS = (["full_attention"], ["sliding_attention"], ["full_attention", "sliding_attention"])
ROPE = ("rope_type", "type", "rope_theta")  # fields of every rotation
MROPE = ("mrope_section", "mrope_interleaved")  # of pictures; texts are rotated as without
TRAINED_FOR = "give the target that it was trained for with target=DIR"


@dataclass
class ConvertedDrafter:
    """A directory that is being converted."""

    found: Foreign
    target: Target
    options: dict[str, Any]  # our family's options that the directory determines
    tensors: dict[str, Tensor]  # under our names, as they were saved
    notes: list[str] = field(default_factory=list)  # for the user


def nothing(draft: ConvertedDrafter) -> None:
    """For layouts that store every tensor in our form."""


def usual_layers() -> Mapping[str, Any]:
    """What transformers' Llama and Qwen3 take for fields that are missing."""
    return LlamaConfig().to_dict() | Qwen3Config().to_dict()


def as_built(draft: ConvertedDrafter, own: Mapping[str, Tensor]) -> None:
    """For layouts that contain every tensor of the drafter."""


@dataclass(frozen=True, slots=True)
class Importer:
    """A layout that can be imported. Exactly one must recognise a directory."""

    name: str  # of the layout, as in the support matrix
    family: str
    knows: Callable[[Foreign], bool]  # recognises a directory by its configuration and tensor names
    options: Callable[[Foreign, Target], dict[str, Any]]  # our family's options, from the directory
    renames: Renames | Callable[[Foreign], Renames] = SAME  # their tensor names and ours
    shared: Mapping[str, str] = field(default_factory=dict)  # tensors that must equal the target's; they are not kept
    mend: Callable[[ConvertedDrafter], None] = nothing  # brings tensors into our form, under our names
    # those of the shared tensors that are not the target's, but the drafter's own
    own: Callable[[Foreign, Target], tuple[str, ...]] = lambda found, target: ()
    # adds tensors that come from elsewhere, given those of the built drafter
    complete: Callable[[ConvertedDrafter, Mapping[str, Tensor]], None] = as_built
    places: tuple[str, ...] = ()  # options that tell where weights are, not what they are
    # values of fields that change nothing where no importer asks for them; None: another library reads the whole configuration
    usual: Callable[[], Mapping[str, Any]] | None = usual_layers

    def names(self, found: Foreign) -> Renames:
        """The tensor names of this directory and ours."""
        return self.renames if isinstance(self.renames, Renames) else self.renames(found)

    def dtype(self, found: Foreign) -> str:
        """The dtype of the drafter's own weights."""
        return found.dtype(without=self.shared)


def speculators(kind: str) -> Callable[[Foreign], bool]:
    """Recognises speculators' layout of this type."""
    return lambda found: found.config.get(TYPE) == kind


def same_size(found: Foreign, what: str, got: Any, wanted: int) -> None:
    """Raise UserError where a size is given that is not the target's."""
    if got is not None and got != wanted:
        raise UserError(
            f"{found.origin}: made for another target: its {what} is {got}, this target's is {wanted}; {TRAINED_FOR}"
        )


def check_shared(found: Foreign, name: str, what: str, target: Any) -> None:
    """Raise UserError unless this tensor equals the target's, up to the rounding of either."""
    own = _shared(what, target).detach().cpu()
    given = found.tensors[name]
    if own.shape != given.shape:
        raise UserError(
            f"{found.origin}: {name} is {list(given.shape)}, this target's {what} is {list(own.shape)}; {TRAINED_FOR}"
        )
    if not is_shared(given, what, target):
        raise UserError(f"{found.origin}: {name} is not this target's {what}, which drafters here use; {TRAINED_FOR}")


def is_shared(given: Tensor, what: str, target: Any) -> bool:
    """Whether a tensor of this shape is the target's, up to the rounding of either."""
    own = _shared(what, target).detach().cpu()
    return _alike(own, given) or (what == EMBEDDING and _alike(_embedded(target), given))


def _alike(own: Tensor, given: Tensor) -> bool:
    """Whether two weights are equal up to the rounding of either."""
    step = 2 * max(torch.finfo(own.dtype).eps, torch.finfo(given.dtype).eps)
    return torch.allclose(own.float(), given.float(), rtol=step, atol=step * float(own.abs().max()) * 2**-8)


@torch.no_grad()
def _embedded(target: Any) -> Tensor:
    """[V, H] all tokens as the target embeds them: some apply a factor, which files may have in them."""
    found: Tensor = target.embed(torch.arange(target.shape.vocab_size, device=target.device))
    return found.detach().cpu()


def _shared(what: str, target: Any) -> Tensor:
    if what == NORM:
        weight: Tensor = final_norm(target.model, target.shape.blocks).weight  # type: ignore[assignment]
        return weight
    found: Tensor = target.model.get_input_embeddings().weight if what == EMBEDDING else target.head_weight
    return found


def layer_options(found: Foreign, fields: Mapping[str, Any], target: Target, kind: str = "llama") -> dict[str, Any]:
    """`LayerOptions` as plain data: where the described layers are not shaped like the target's.

    Missing fields get transformers' defaults for Llama (kind: or Qwen3), as in serving stacks.
    """
    same_size(found, "hidden size", fields.get("hidden_size"), target.shape.hidden_size)
    same_size(found, "vocabulary", fields.get("vocab_size"), target.shape.vocab_size)
    found.wants("hidden_act", fields.get("hidden_act"), (None, "silu", "swish"), "but drafter layers are gated by SiLU")
    _check_rope(found, fields)
    known = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
    rope = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")
    given = {key: fields[key] for key in known + rope if fields.get(key) is not None}
    of: Any = Qwen3Config if kind == "qwen3" else LlamaConfig
    try:
        config = of(hidden_size=target.shape.hidden_size, **copy.deepcopy(given))  # a copy, because it changes its arguments
        shape = shape_of(config)
    except Exception as error:  # its validation raises many kinds
        reason = " ".join(str(error).split())[:160]
        raise UserError(f"{found.origin}: {found.config_name} describes no decoder layer ({reason}); correct it") from error
    own = replace(_scaled(found, shape, config, target.shape.max_positions), **_windows(found, fields))
    return asdict(LayerOptions.between(own, target.shape))


def _check_rope(found: Foreign, fields: Mapping[str, Any]) -> None:
    """Raise UserError for rotations that drafters' layers do not have. Transformers 5 writes them into `rope_parameters`."""
    for holder in (fields, fields.get("rope_parameters"), fields.get("rope_scaling")):
        part = holder.get("partial_rotary_factor") if isinstance(holder, Mapping) and not _proportional(holder) else None
        found.wants("partial_rotary_factor", part, (None, 1.0), "but drafter layers rotate whole heads")
    for key in ("is_neox_style", "rope_is_neox_style"):
        found.wants(key, fields.get(key), (None, True), "but drafter layers rotate the two halves of a head")
    rope = fields.get("rope_parameters")
    if isinstance(rope, Mapping) and any(isinstance(value, Mapping) for value in rope.values()):
        raise UserError(f"{found.origin}: rope_parameters differ by kind of layer; drafter layers have the same rotation")


def _proportional(rope: Mapping[str, Any]) -> bool:
    """Whether a rotation leaves the last pairs of a head as they are: its other fields have another sense."""
    return "proportional" in (rope.get("rope_type"), rope.get("type"))


def _windows(found: Foreign, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The sliding windows of `LayerShape`. A window that no layer has is ignored: targets' fields are often copied.

    So are kinds of further layers, as engines look up those of the layers that there are.
    """
    layers, used = fields.get("num_hidden_layers", 1), fields.get("use_sliding_window")
    if not isinstance(layers, int) or isinstance(layers, bool):
        raise UserError(f"{found.origin}: num_hidden_layers is {layers!r}; a number is needed")
    kinds = fields.get("layer_types") or ["sliding_attention" if used else "full_attention"] * layers
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise UserError(f"{found.origin}: layer_types is {kinds!r}; a list of names is needed")
    kinds = kinds[:layers]
    found.wants("layer_types", sorted(set(kinds)), KINDS, "but layers of drafters see all positions or a window")
    if len(kinds) < layers:
        raise UserError(f"{found.origin}: layer_types names {len(kinds)} layers, num_hidden_layers is {layers}; correct one")
    if "sliding_attention" not in kinds:
        return {}
    found.wants("use_sliding_window", used, (None, True), "but layer_types has layers with a window")
    window = fields.get("sliding_window")
    if not isinstance(window, int) or isinstance(window, bool):
        raise UserError(f"{found.origin}: sliding_window is {window!r}, and layers have windows; a number is needed")
    full = tuple(i for i, kind in enumerate(kinds) if kind == "full_attention")
    return {"sliding_window": window, "full_attention_layers": full}


def _scaled(found: Foreign, shape: Any, config: Any, positions: int) -> LayerShape:
    """The layers' dimensions with their rotary scaling. positions: of the target."""
    rope = {key: value for key, value in config.rope_parameters.items() if value is not None}
    kind, own = str(rope.get("rope_type", "default")), config.max_position_embeddings
    scaling = {"rope_type": kind} | {key: value for key, value in rope.items() if key not in (*ROPE, *_unread_rope(kind))}
    if kind == "longrope":  # transformers takes the ratio of the contexts for a factor that is missing
        scaling.setdefault("factor", own / scaling[CONTEXT])
    if kind == "dynamic" and own < positions:
        raise UserError(
            f"{found.origin}: its positions are scaled dynamically beyond {own}, this target has {positions}; drafter layers "
            "rotate all texts alike"
        )
    try:
        check_scaling(scaling, shape.head_dim)
    except UserError as error:
        raise UserError(f"{found.origin}: {error}") from error
    return LayerShape(**asdict(shape), rope_scaling=None if kind == "default" else scaling)


def _unread_rope(kind: str) -> tuple[str, ...]:
    """Fields that transformers does not read in this kind of scaling."""
    whole = () if kind == "proportional" else ("partial_rotary_factor",)  # 1, as `_check_rope` found
    return (*whole, *(() if CONTEXT in scaling_fields(kind) else (CONTEXT,)), *(MROPE if kind == "default" else ()))


def counted(found: Foreign, key: str, there: int, what: str, notes: list[str]) -> None:
    """Note a number in the configuration that differs from the weights. Some published drafters have such."""
    number = found.config.get(key)
    if number is not None and number != there:
        notes.append(f"{found.config_name} says {key} {number}, its weights have {there} {what}: {there} is used")
