"""Targets that read images next to text: transformers' models of a vision tower and a language model.

The tower runs once for each image. Its features replace the embeddings of the image's rows, and everything after that is the
language model's. Callers give positions as indices; this runner turns them into rotary positions.

Shapes: B rows, N new positions, T positions, M rows of images in a pass, R rows of one image, H hidden.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from drafttrain.core.errors import UserError
from drafttrain.decoding.graph_runner import capturing
from drafttrain.model.images import FIRST, bases, rows, spans
from drafttrain.model.kv_cache import KVCache
from drafttrain.model.masks import Documents
from drafttrain.targets.hf import HFTarget
from drafttrain.targets.images import ImageReader

KEPT_BYTES = 2**29  # of features of images, on the target's device


@dataclass(frozen=True, slots=True)
class VisionKind:
    """How a language model reads images."""

    rotary: bool = False  # rotary positions have a temporal, a vertical and a horizontal part (arXiv 2409.12191, section 2.1)
    whole: tuple[str, ...] = ()  # types of layers in which the rows of an image see each other
    by_config: bool = False  # they do so only where the configuration says it
    padded: bool = False  # the embeddings of placeholders, also of those that stand in a text, are those of padding
    text: bool = False  # engines have no other class for such checkpoints, whether they read images or not


GRID = VisionKind(rotary=True)
ARCHITECTURES = {
    **dict.fromkeys(("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"), GRID),
    **dict.fromkeys(("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"), GRID),
    **dict.fromkeys(("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"), replace(GRID, text=True)),
    "Gemma3ForConditionalGeneration": VisionKind(whole=("full_attention", "sliding_attention")),
    "Gemma4ForConditionalGeneration": VisionKind(whole=("sliding_attention",), by_config=True, padded=True, text=True),
}


@dataclass(frozen=True, slots=True)
class Features:
    """What the language model reads of an image."""

    layers: list[Tensor]  # [R, H] each: the embeddings, then what is added to the outputs of the first blocks
    place_R3: Tensor  # rotary positions, from the image's first
    shift: int  # rotary positions that the image takes, less its rows

    @property
    def bytes(self) -> int:
        return sum(layer.numel() * layer.element_size() for layer in self.layers)


@dataclass(frozen=True, slots=True)
class Pictured:
    """The rows of images of one pass, in order."""

    layers: list[Tensor]  # [M, H] each
    place_M3: Tensor
    shift_M: Tensor  # of the image, at its last row; 0 at others


class VisionTarget(HFTarget):
    """As HFTarget, for sequences that hold ids of images too.

    reader: gives the pixels. drafter_inputs: what `embed` gives drafters at an image's rows: the tower's features (fused), or
    the embedding of the target's placeholder token (placeholder).
    """

    name = "vision"
    reader: ImageReader | None = None
    drafter_inputs = "fused"

    def __init__(
        self,
        model: PreTrainedModel,
        stop_ids: frozenset[int] = frozenset(),
        frozen: bool = True,
        reader: ImageReader | None = None,
        drafter_inputs: str = "fused",
    ) -> None:
        super().__init__(model, stop_ids, frozen)
        self.reader, self.drafter_inputs = reader, drafter_inputs

    def _prepare(self) -> None:
        self.kind, config = ARCHITECTURES[type(self.model).__name__], self.model.config
        if self.kind.by_config and config.get_text_config().use_bidirectional_attention != "vision":
            self.kind = replace(self.kind, whole=())
        self.whole_images = bool(self.kind.whole)
        self.placeholder = int(config.image_token_id)
        names = ("image_token_id", "video_token_id", "audio_token_id") if self.kind.padded else ()
        self.padding = int(config.get_text_config().pad_token_id) if names else 0
        self.padded = [int(token) for name in names if (token := getattr(config, name, None)) is not None]
        self._features: OrderedDict[int, Features] = OrderedDict()

    @property
    def text_model(self) -> Any:
        model: Any = self.model
        text_cls: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model.config), type(model))
        if text_cls is type(model):
            return model
        with torch.device("meta"):
            text = text_cls(model.config.get_text_config())
        text.model, text.lm_head = self.backbone.module, model.get_output_embeddings()
        return text

    def _trainable(self, model: PreTrainedModel) -> HFTarget:
        kind = VisionTarget if type(model).__name__ in ARCHITECTURES else HFTarget
        return kind(model, self.stop_ids, frozen=False)

    def _view(self, model: PreTrainedModel) -> HFTarget:
        return VisionTarget(model, self.stop_ids, reader=self.reader, drafter_inputs=self.drafter_inputs)

    def embed(self, token: Tensor) -> Tensor:
        image = token >= FIRST
        if capturing(token.device):  # a decode step reads text; its padding may hold any id, and nothing may ask the device
            return super().embed(token.masked_fill(image, self._placeholder))
        if not bool(image.any()):
            return super().embed(token)
        if self.drafter_inputs == "placeholder":
            return super().embed(token.masked_fill(image, self._placeholder))
        return self._fused(token.masked_fill(image, 0), image, self._pictured(token[image]))

    def _complete(self, hidden: dict[int, Tensor], inputs: dict[str, Any]) -> None:
        """What is added to the first blocks' outputs belongs to them, as in vLLM; transformers adds it after their hooks."""
        for block, added_MH in enumerate(inputs.get("deepstack_visual_embeds", ())):
            if block in hidden:
                state_BNH, image_BN1 = hidden[block], inputs["visual_pos_masks"][..., None]
                added_BNH = torch.zeros_like(state_BNH).masked_scatter(image_BN1, added_MH.to(state_BNH.dtype))
                hidden[block] = state_BNH + added_BNH

    @property
    def _placeholder(self) -> int:
        assert self.placeholder is not None
        return self.placeholder if self.placeholder < self.shape.vocab_size else 0

    def _fused(self, text: Tensor, image: Tensor, pictured: Pictured) -> Tensor:
        """[..., H] embeddings with the images' features. text: ids of the vocabulary."""
        embedded = super().embed(text)
        return embedded.masked_scatter(image[..., None], pictured.layers[0].to(embedded.dtype))

    def _text(self, token: Tensor) -> Tensor:
        """The tokens that the language model looks up."""
        for placeholder in self.padded:
            token = token.masked_fill(token == placeholder, self.padding)
        return token

    def _inputs(
        self, token_BN: Tensor, kv: KVCache | None, ancestor_BNN: Tensor | Documents | None, position_BN: Tensor
    ) -> dict[str, Any]:
        image_BN = token_BN >= FIRST
        if isinstance(ancestor_BNN, Tensor) or not bool(image_BN.any()):  # a draft tree holds text
            inputs = super()._inputs(self._text(token_BN), kv, ancestor_BNN, position_BN)
            if self.kind.rotary and kv is not None:
                inputs["position_ids"] = position_BN + kv.shift_B[:, None]
            return inputs
        pictured = self._pictured(token_BN[image_BN])
        inputs = super()._inputs(token_BN, kv, ancestor_BNN, position_BN)
        del inputs["input_ids"]
        text_BN = self._text(token_BN).masked_fill(image_BN, self.padding)
        inputs["inputs_embeds"] = self._fused(text_BN, image_BN, pictured)
        if self.kind.rotary:
            inputs["position_ids"] = self._rotary(token_BN, image_BN, pictured, kv, ancestor_BNN, position_BN)
        if len(pictured.layers) > 1:
            inputs |= {"visual_pos_masks": image_BN, "deepstack_visual_embeds": pictured.layers[1:]}
        if getattr(self.backbone.module, "hidden_size_per_layer_input", 0):
            inputs["per_layer_inputs"] = self.backbone.module.get_per_layer_inputs(text_BN)
        if self.whole_images:
            inputs = {name: value for name, value in inputs.items() if name not in ("whole", "documents")}
            inputs["attention_mask"] = self._whole_masks(token_BN, image_BN, kv, ancestor_BNN, position_BN)
        return inputs

    def _rotary(
        self,
        token_BN: Tensor,
        image_BN: Tensor,
        pictured: Pictured,
        kv: KVCache | None,
        documents: Documents | None,
        position_BN: Tensor,
    ) -> Tensor:
        """[3, B, N] rotary positions. An image's shift counts from the position after its last row, also in later passes.

        Worked example, `a`, an image of 2 x 2 rows, `b`: the rows have (1, 1, 1), (1, 1, 2), (1, 2, 1), (1, 2, 2), and `b`,
        at index 5, has 3.
        """
        shift_BN = torch.zeros_like(token_BN).masked_scatter(image_BN, pictured.shift_M)
        offset_BN = shift_BN.cumsum(1) - shift_BN
        if kv is not None:
            offset_BN = offset_BN + kv.shift_B[:, None]
            kv.add_shift(shift_BN.sum(1))
        elif documents is not None:  # a document does not count the images of those before it
            column_N = torch.arange(token_BN.shape[1], device=token_BN.device)
            begins_BN = torch.ones_like(image_BN)
            begins_BN[:, 1:] = documents.number_BT[:, 1:] != documents.number_BT[:, :-1]
            offset_BN = offset_BN - offset_BN.gather(1, column_N.where(begins_BN, 0).cummax(1).values)
        first_BN = position_BN + offset_BN
        row_BN = torch.where(image_BN, rows(token_BN), 0)
        axes = [torch.zeros_like(token_BN).masked_scatter(image_BN, place_M) for place_M in pictured.place_M3.unbind(1)]
        return torch.stack([first_BN - row_BN + place_BN for place_BN in axes])

    def _whole_masks(
        self,
        token_BN: Tensor,
        image_BN: Tensor,
        kv: KVCache | None,
        documents: Documents | None,
        position_BN: Tensor,
    ) -> Any:
        """The masks of all layers. In those of `kind.whole` the rows of an image see the later ones too."""
        first_BN = image_BN & (rows(token_BN) == 0)
        number_BN = torch.where(image_BN, first_BN.cumsum(1), 0)
        same_BNN = (number_BN[:, None] == number_BN[..., None]) & image_BN[:, None]
        same_BNN = same_BNN.triu(1)  # the rows before are in the masks already, as far as a window reaches
        masks = self.masks(kv, documents, position_BN, self.dtype)

        def opened(mask_B1NP: Tensor) -> Tensor:
            B, N, _ = same_BNN.shape
            start_B = torch.zeros(B, dtype=torch.long, device=token_BN.device) if kv is None else kv.length_B
            column_BN = start_B[:, None] + torch.arange(N, device=token_BN.device)
            visible_BNP = torch.zeros_like(mask_B1NP[:, 0], dtype=torch.bool)
            visible_BNP.scatter_(2, column_BN[:, None].expand(B, N, N), same_BNN)
            return mask_B1NP.masked_fill(visible_BNP[:, None], 0.0)

        if not isinstance(masks, dict):
            return opened(masks)
        return {name: opened(mask) if name in self.kind.whole else mask for name, mask in masks.items()}

    def _pictured(self, id_M: Tensor) -> Pictured:
        """The features of these rows of images."""
        base_U, image_M = bases(id_M).unique(return_inverse=True)
        features = [self._image(base) for base in base_U.tolist()]
        size_U = torch.tensor([len(f.place_R3) for f in features], device=id_M.device)
        row_M = rows(id_M)
        index_M = (size_U.cumsum(0) - size_U)[image_M] + row_M
        shift_U = torch.tensor([f.shift for f in features], device=id_M.device)
        layers = [torch.cat(parts)[index_M] for parts in zip(*(f.layers for f in features), strict=True)]
        shift_M = torch.where(row_M == size_U[image_M] - 1, shift_U[image_M], 0)
        return Pictured(layers, torch.cat([f.place_R3 for f in features])[index_M], shift_M)

    def _image(self, base: int) -> Features:
        """The features of an image, computed when it is first read."""
        if base not in self._features:
            with torch.inference_mode(False), torch.no_grad():  # a drafter may train on what decoding has computed
                self._features[base] = self._computed(base)
            while len(self._features) > 1 and sum(f.bytes for f in self._features.values()) > KEPT_BYTES:
                self._features.popitem(last=False)
        self._features.move_to_end(base)
        return self._features[base]

    def _computed(self, base: int) -> Features:
        if self.reader is None:
            raise UserError("this target was made without an image processor; it reads text alone")
        model: Any = self.model.base_model
        pixels = {name: x.to(self.device) for name, x in self.reader.pixels(base).items()}
        pixels["pixel_values"] = pixels["pixel_values"].to(self.dtype)
        out = model.get_image_features(**pixels, return_dict=True)
        embedded_RH = _joined(out.pooler_output)
        deepstack = [_joined(layer) for layer in getattr(out, "deepstack_features", None) or ()]
        count = len(embedded_RH)
        place_R3, shift = torch.zeros(count, 3, dtype=torch.long, device=self.device), 0
        if self.kind.rotary:
            token_1R = torch.full((1, count), self._placeholder, device=self.device)
            place_31R, delta = model.get_rope_index(
                token_1R, mm_token_type_ids=torch.ones_like(token_1R), image_grid_thw=pixels["image_grid_thw"]
            )
            place_R3, shift = place_31R[:, 0].T.contiguous(), int(delta)
        return Features([embedded_RH, *deepstack], place_R3, shift)

    def generation_inputs(self, token_BT: Tensor) -> dict[str, Tensor]:
        model: Any = self.model.base_model
        if self.kind.rotary:
            model.rope_deltas = None  # transformers adds those of the last call with images to text too
        image_BT = token_BT >= FIRST
        if self.reader is None or not bool(image_BT.any()):
            return {"input_ids": token_BT}
        image_inputs = [self.reader.pixels(row[start]) for row in token_BT.tolist() for start, _ in spans(row)]
        inputs = {name: torch.cat([pixels[name] for pixels in image_inputs]).to(self.device) for name in image_inputs[0]}
        inputs["pixel_values"] = inputs["pixel_values"].to(self.dtype)
        type_key = next(n for n in ("mm_token_type_ids", "token_type_ids") if n in signature(self.model.forward).parameters)
        return inputs | {"input_ids": token_BT.masked_fill(image_BT, self.placeholder or 0), type_key: image_BT.long()}


def _joined(parts: Any) -> Tensor:
    """[R, H] the features of one image, which transformers splits by image."""
    features: Tensor = parts if isinstance(parts, Tensor) else torch.cat(list(parts))
    return features.flatten(0, -2)
