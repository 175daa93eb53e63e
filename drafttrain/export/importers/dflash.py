"""DFlash: the layouts of the authors (z-lab), of DeepSpec, of transformers and of speculators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drafttrain.core.errors import UserError
from drafttrain.export.importers.block_fields import (
    NESTED,
    causal_options,
    check_factor,
    check_vocabulary,
    field_of,
    inside,
    number_of,
)
from drafttrain.export.importers.directory import MASK_EMBEDDING, Foreign
from drafttrain.export.importers.eagle3 import draft_vocab, store_vocabulary
from drafttrain.export.importers.row import (
    EMBEDDING,
    HEAD,
    INNER,
    TRAINED_FOR,
    TYPE,
    Importer,
    layer_options,
    same_size,
    speculators,
)
from drafttrain.export.layouts.dflash import TRANSFORMERS
from drafttrain.export.layouts.target_ends import embedding_scale
from drafttrain.model.target import Target

SHIFTED, EMBEDDED = "sample_from_anchor", "input_embedding_scale"
PLAIN = ("fc", "hidden_norm", "norm", "layers", "embed_tokens", "lm_head", "d2t", "t2d")  # first parts of tensors' names
ANCHORED = ("Qwen3DSparkModel", "DSparkDraftModel")  # classes whose slots are shifted unless their files say otherwise
COPIES = {"embed_tokens.weight": EMBEDDING, "lm_head.weight": HEAD}  # tensors of the target that some files have


def plain(found: Foreign) -> bool:
    """Recognises the authors' tensor names without a head. speculators has its own layout with the same names."""
    named = found.has("fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_norm.weight") and TYPE not in found.config
    mixed = found.has("layers.0.attention_conv.base_kernel")
    return named and not mixed and all(name.split(".")[0] in PLAIN for name in found.kinds)


def causal_head(found: Foreign) -> bool:
    """Whether the files say in the way of a drafter of causal blocks that its blocks are causal."""
    return bool(field_of(found, "causal_head", False))


def _anchored(found: Foreign) -> bool:
    return any(name in ANCHORED for name in found.architectures)


def _zlab(found: Foreign) -> bool:
    return plain(found) and not causal_head(found) and not _anchored(found)


def _deepspec(found: Foreign) -> bool:
    """Files of a class with a Markov head, of rank 0: their block is this family's, with shifted slots."""
    return plain(found) and _anchored(found)


def _transformers(found: Foreign) -> bool:
    return found.has("encoder.fc.weight", "encoder.output_norm_enc.weight")


def speculators_options(
    found: Foreign, target: Target, shifted: bool | None = False, non_causal: bool = False, part: bool = False
) -> dict[str, Any]:
    """Options from speculators' configuration. Its layer ids are k, blocks whose inputs are read. shifted: the default
    convention; None: it must be said. non_causal: the default for slots of layers with windows. part: as for `zlab_options`.
    """
    inner, blocks = found.object(INNER), target.shape.blocks
    same_size(found, "target_hidden_size", found.config.get("target_hidden_size"), target.shape.hidden_size)
    layers = found.field("aux_hidden_state_layer_ids")
    if not isinstance(layers, list) or not all(isinstance(k, int) and 1 <= k <= blocks for k in layers):
        raise UserError(
            f"{found.origin}: aux_hidden_state_layer_ids is {layers!r}; of a target of {blocks} blocks, 1 to {blocks} can be "
            f"read; {TRAINED_FOR}"
        )
    given = found.config.get(SHIFTED)
    given = shifted if given is None else found.flag(SHIFTED, given)
    if given is None:
        raise UserError(
            f"{found.origin}: {found.config_name} does not say {SHIFTED}, for which vLLM takes false here and SGLang true; add "
            "it as the drafter was trained"
        )
    given_windows = found.config.get("sliding_window_non_causal")
    non_causal = non_causal if given_windows is None else found.flag("sliding_window_non_causal", given_windows)
    own = layer_options(found, inner, target, "qwen3")
    return {
        **_vocabulary(found, target, part),
        "block_size": found.number("block_size"),
        "layer": own,
        **({} if own["sliding_window"] is None else {"causal_windows": not non_causal}),
        "layers": found.number("num_hidden_layers", INNER),
        "taps": [k - 1 for k in layers],
        "mask_token": found.number("mask_token_id", least=0),
        "slots": "shifted" if given else "in_place",
    }


def own_head(found: Foreign, target: Target) -> tuple[str, ...]:
    """The head's tensor, where the drafter drafts a part of the target's vocabulary."""
    if not found.has("d2t", "lm_head.weight"):
        return ()
    apart = len(found.tensors["lm_head.weight"]) < target.shape.vocab_size or bool(found.tensors["d2t"].any())
    return ("lm_head.weight",) if apart else ()


def _vocabulary(found: Foreign, target: Target, part: bool) -> dict[str, Any]:
    """The option of drafters that can draft a part of the target's vocabulary. part: whether these can."""
    if part and own_head(found, target):
        return {"draft_vocab": draft_vocab(found, target.shape.vocab_size)}
    check_vocabulary(found, target.shape.vocab_size)
    return {"draft_vocab": None} if part else {}


def zlab_options(found: Foreign, target: Target, shifted: bool = False, part: bool = False) -> dict[str, Any]:
    """Options from a configuration in the authors' form. shifted: the convention where the files do not say it. part: they may
    draft a part of the target's vocabulary.

    The fields of the block are at the top level or in `dflash_config`. Layer ids are k - 1, blocks whose outputs are read.
    """
    factor = embedding_scale(target) or 1.0
    check_factor(found, EMBEDDED, factor, factor)  # loaders differ in whether embeddings have the target's without the field
    fields, forced = _windowed(found)
    options = _options(found, fields, target)
    windows = options["layer"]["sliding_window"] is not None
    causal = causal_options(found, windows)
    if forced and not causal["causal"]:
        causal["causal_windows"] = False
    slots = "shifted" if found.flag(SHIFTED, field_of(found, SHIFTED, shifted)) else "in_place"
    return options | causal | {"slots": slots} | _vocabulary(found, target, part)


def _windowed(found: Foreign) -> tuple[Mapping[str, Any], bool]:
    """(the layers' fields, whether `use_swa` alone gives them windows) with the keys of `dflash_config` that vLLM reads.

    `swa_window_size` counts before `sliding_window`. With `use_swa` all layers have windows where `layer_types` names none, and
    slots see later slots of their block.
    """
    inner, kinds = found.config.get(NESTED) or {}, found.config.get("layer_types") or []
    forced = inner.get("use_swa") is not None and found.flag("use_swa", inner["use_swa"]) and "sliding_attention" not in kinds
    own: dict[str, Any] = {}
    if forced:
        own = {"layer_types": ["sliding_attention"] * found.number("num_hidden_layers"), "use_sliding_window": True}
    if inner.get("swa_window_size") is not None:
        own["sliding_window"] = inner["swa_window_size"]
    return found.config.having(own), forced


def _deepspec_options(found: Foreign, target: Target) -> dict[str, Any]:
    rank = field_of(found, "markov_rank", 0)
    found.wants("markov_rank", rank, (0,), "but there are no markov_head tensors")
    return zlab_options(found, target, shifted=True, part=True)


def _zlab_options(found: Foreign, target: Target) -> dict[str, Any]:
    return zlab_options(found, target, part=True)


def _speculators_options(found: Foreign, target: Target) -> dict[str, Any]:
    return speculators_options(found, target, part=True)


def _transformers_options(found: Foreign, target: Target) -> dict[str, Any]:
    """No layer is causal. The window counts the positions to either side, and all layers have one of 2048 by default."""
    window, layers = found.config.get("sliding_window", 2048), found.number("num_hidden_layers")
    kinds = found.config.get("layer_types") or ["sliding_attention"] * layers
    more = {"sliding_window": window + 1 if isinstance(window, int) else window, "layer_types": kinds}
    options = _options(found, found.config.having(more), target)
    windows = {} if options["layer"]["sliding_window"] is None else {"causal_windows": False}
    return options | {"causal": False, "slots": "in_place"} | windows


def _options(found: Foreign, layers: Mapping[str, Any], target: Target) -> dict[str, Any]:
    """The options that the authors' and transformers' layouts give alike. layers: the fields of the drafter's own layers."""
    blocks = target.shape.blocks
    if (found.directory / MASK_EMBEDDING).is_file():
        raise UserError(
            f"{found.origin}: {MASK_EMBEDDING} holds an embedding of its own for masks, but drafters here embed a token of the "
            "target; take one without it"
        )
    same_size(found, "num_target_layers", found.config.get("num_target_layers"), blocks)
    taps = found.field("target_layer_ids", *inside(found, "target_layer_ids"))
    if not isinstance(taps, list) or not all(isinstance(b, int) and 0 <= b < blocks for b in taps):
        raise UserError(
            f"{found.origin}: target_layer_ids is {taps!r}, this target has blocks 0 to {blocks - 1}; {TRAINED_FOR}"
        )
    return {
        "block_size": number_of(found, "block_size"),
        "layer": layer_options(found, layers, target, "qwen3"),
        "layers": found.number("num_hidden_layers"),
        "taps": taps,
        "mask_token": found.number("mask_token_id", *inside(found, "mask_token_id"), least=0),
    }


PART: dict[str, Any] = {"shared": COPIES, "own": own_head, "mend": store_vocabulary}
ROWS = [
    Importer("z-lab", "dflash", _zlab, _zlab_options, **PART),
    Importer("DeepSpec", "dflash", _deepspec, _deepspec_options, **PART),
    Importer("speculators", "dflash", speculators("dflash"), _speculators_options, **PART),
    Importer("muse_glimmer_assistant", "dflash", _transformers, _transformers_options, TRANSFORMERS),
]
