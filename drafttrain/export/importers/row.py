"""One layout on its way here, and what all of them are held against: the target's sizes, its embedding and its head."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from drafttrain.core.errors import UserError
from drafttrain.export.importers.directory import Foreign
from drafttrain.export.layouts.renames import SAME, Renames
from drafttrain.model.layers import SCALINGS, LayerOptions, LayerShape, check_scaling
from drafttrain.model.target import Target
from drafttrain.targets.shallow import final_norm
from drafttrain.targets.structure import shape_of

EMBEDDING, HEAD, NORM = "embedding", "output matrix", "last norm"
TRAINED_FOR = "give the target it was trained for with target=hf target.path=DIR"


@dataclass
class Draft:
    """What becomes of a directory. options: of our family, those that the directory determines. tensors: by our names, as they
    were saved. left: options that the directory has no say in. notes: for the user.
    """

    found: Foreign
    target: Target
    options: dict[str, Any]
    tensors: dict[str, Tensor]
    notes: list[str] = field(default_factory=list)


def nothing(draft: Draft) -> None:
    """No tensor is stored in another form than ours."""


def as_built(draft: Draft, own: Mapping[str, Tensor]) -> None:
    """The directory has all that a drafter is made of."""


@dataclass(frozen=True, slots=True)
class Importer:
    """name: of the layout, as in the support matrix. knows: whether a directory is of it, by configuration and tensor names.

    shared: tensors that are the target's, by their names: they must be equal to it, and are not kept. mend: brings tensors to
    our form, under our names. complete: with the tensors of the drafter that was built, where some come from elsewhere.
    places: options that say where weights are from, not what they are of.
    """

    name: str
    family: str
    knows: Callable[[Foreign], bool]
    options: Callable[[Foreign, Target], dict[str, Any]]
    renames: Callable[[Foreign], Renames] = lambda found: SAME
    shared: Mapping[str, str] = field(default_factory=dict)
    mend: Callable[[Draft], None] = nothing
    complete: Callable[[Draft, Mapping[str, Tensor]], None] = as_built
    places: tuple[str, ...] = ()

    def dtype(self, found: Foreign) -> str:
        """Of the drafter's own weights."""
        return found.dtype(without=self.shared)


def same_size(found: Foreign, what: str, got: Any, wanted: int) -> None:
    """Raise UserError where a size is said that is not the target's."""
    if got is not None and got != wanted:
        raise UserError(
            f"{found.origin}: made for another target: its {what} is {got}, this target's is {wanted}; {TRAINED_FOR}"
        )


def check_shared(found: Foreign, name: str, what: str, target: Any) -> None:
    """Raise UserError unless a tensor that the target has too is the target's, up to the rounding of either."""
    own = _shared(what, target).detach().cpu()
    given = found.tensors[name]
    if own.shape != given.shape:
        raise UserError(
            f"{found.origin}: {name} is {list(given.shape)}, this target's {what} is {list(own.shape)}; {TRAINED_FOR}"
        )
    step = 2 * max(torch.finfo(own.dtype).eps, torch.finfo(given.dtype).eps)
    if not torch.allclose(own.float(), given.float(), rtol=step, atol=step * float(own.abs().max()) * 2**-8):
        raise UserError(
            f"{found.origin}: {name} is not this target's {what}, and drafters here have none of their own; {TRAINED_FOR}"
        )


def _shared(what: str, target: Any) -> Tensor:
    if what == NORM:
        weight: Tensor = final_norm(target.model, target.shape.blocks).weight  # type: ignore[assignment]
        return weight
    found: Tensor = target.model.get_input_embeddings().weight if what == EMBEDDING else target.head_weight
    return found


def layer_options(found: Foreign, fields: Mapping[str, Any], target: Target, kind: str = "llama") -> dict[str, Any]:
    """`LayerOptions` as plain data: where the layers that a configuration describes are not shaped like the target's.

    What the configuration does not say is what transformers takes for Llama (kind: or Qwen3) then, as serving stacks do.
    """
    same_size(found, "hidden size", fields.get("hidden_size"), target.shape.hidden_size)
    same_size(found, "vocabulary", fields.get("vocab_size"), target.shape.vocab_size)
    found.wants("hidden_act", fields.get("hidden_act"), (None, "silu", "swish"), "and layers of drafters are gated by SiLU")
    found.wants(
        "partial_rotary_factor", fields.get("partial_rotary_factor"), (None, 1.0), "and layers of drafters rotate whole heads"
    )
    known = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
    rope = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")
    given = {key: fields[key] for key in known + rope if fields.get(key) is not None}
    of: Any = Qwen3Config if kind == "qwen3" else LlamaConfig
    try:
        config = of(hidden_size=target.shape.hidden_size, **copy.deepcopy(given))  # which it writes into
        shape = shape_of(config)
    except Exception as error:  # whatever its validation raises
        reason = " ".join(str(error).split())[:160]
        raise UserError(f"{found.origin}: {found.config_name} describes no decoder layer ({reason}); mend it") from error
    return asdict(LayerOptions.between(_scaled(found, shape, config.rope_parameters), target.shape))


def _scaled(found: Foreign, shape: Any, rope: Mapping[str, Any]) -> LayerShape:
    kind = str(rope.get("rope_type", "default"))
    kept = {key: rope[key] for key in SCALINGS.get(kind, ()) if key in rope}
    scaling = None if kind == "default" else {"rope_type": kind, **kept}
    try:
        check_scaling(scaling)
    except UserError as error:
        raise UserError(f"{found.origin}: {error}") from error
    return LayerShape(**asdict(shape), rope_scaling=scaling)


def counted(found: Foreign, key: str, there: int, what: str, notes: list[str]) -> None:
    """Say where the configuration has another number of parts than there are: some published ones do."""
    said = found.config.get(key)
    if said is not None and said != there:
        notes.append(f"{found.config_name} says {key} {said}, its weights have {there} {what}: {there} it is")
