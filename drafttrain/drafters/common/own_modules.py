"""Modules for multi-token prediction that targets come with: how each architecture names and combines their tensors.

`from_pretrained` drops these tensors, so they are read from the target's safetensors files. `LayerFusion` mixes tapped states.
Shapes: E experts, I their width, H hidden, L draft layers, T taps.

A module has four parts around a decoder block of the target's own kind. We name them as DeepSeek does: `enorm` and `hnorm`
(norms of the embedding and of the hidden state), `eh_proj` (2H -> H), and `norm`, before the target's head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from drafttrain.core.errors import UserError
from drafttrain.targets.weights import StoredTensors

PREFERRED = 2.0  # of a tap that a layer prefers at the start, or per step away from it


def preferring(layers: int, taps: int) -> Tensor:
    """[L, T] where layer i starts with 2 at tap floor(i T / L), as in AngelSlim's DFlare."""
    logits_LT = torch.zeros(layers, taps)
    for layer in range(layers):
        logits_LT[layer, layer * taps // layers] = PREFERRED
    return logits_LT


def falling(layers: int, taps: int) -> Tensor:
    """[L, T] where layer i starts with -2 |t - c|, c = round(i (T - 1) / (L - 1)): first to last, as in AngelSpec."""
    tap_T = torch.arange(taps)
    centres = [round(layer * (taps - 1) / max(layers - 1, 1)) for layer in range(layers)]
    return torch.stack([-PREFERRED * (tap_T - centre).abs() for centre in centres])


class LayerFusion(nn.Module):
    """A context for each draft layer: its own mixture of the target's tapped states (arXiv 2606.02091).

    The logits over the taps start so that early layers prefer early target layers. The official code has a bare parameter,
    `layer_fusion_weights`. It is a module here, because sharded parameters are gathered for the calls of modules.
    """

    def __init__(self, start_LT: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(start_LT)

    def forward(self, tapped: Sequence[Tensor]) -> Tensor:
        """[L, ..., H] the mixtures. tapped: T states [..., H]."""
        states_TH = torch.stack(list(tapped))
        share_LT = self.weight.float().softmax(-1).to(states_TH.dtype)
        return torch.einsum("lt,t...h->l...h", share_LT, states_TH)


BLOCK = "block"
FUSED = ("gate_up_proj", "down_proj")  # experts' matrices that transformers keeps in one tensor each


@dataclass(frozen=True, slots=True)
class OwnModule:
    """The layout of an architecture's module."""

    # prefix of the four parts' names; {number}: the module's, from 0; {layer}: the number of a block after the target's last
    around: str
    block: str  # prefix of the block's names
    count_key: str  # of config.json: the number of modules
    parts: Mapping[str, str] = field(default_factory=dict)  # names of the four parts, by ours; left out: the same
    hidden_first: bool = False  # eh_proj reads the hidden state first, not the embedding
    norm_output: bool = True  # the next depth reads the output of `norm`; False: the block's own output

    @property
    def several(self) -> bool:
        """Whether files can hold a module for each depth."""
        return "{" in self.around


DEEPSEEK = OwnModule("model.layers.{layer}.", "model.layers.{layer}.", "num_nextn_predict_layers", {"norm": "shared_head.norm"})
QWEN_PARTS = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc"}
QWEN_NEXT = OwnModule("mtp.", "mtp.layers.0.", "num_nextn_predict_layers", QWEN_PARTS)
QWEN_35 = OwnModule("mtp.", "mtp.layers.0.", "mtp_num_hidden_layers", QWEN_PARTS)
MIMO = OwnModule(
    "model.mtp_layers.{number}.",
    "model.mtp_layers.{number}.",
    "num_nextn_predict_layers",
    {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj", "norm": "final_layernorm"},
    hidden_first=True,
)
LAYOUTS = {  # by the model type of the target's text configuration
    "deepseek_v3": DEEPSEEK,
    "glm4_moe": DEEPSEEK,
    "qwen3_next": QWEN_NEXT,
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), QWEN_35),
    "mimo": MIMO,
}
OTHERS = {  # architectures with modules that are not trained here
    **dict.fromkeys(("mimo_v2_flash", "mimo_v2"), "its modules are chained, one for each depth"),
    **dict.fromkeys(("step3p5", "step3p7"), "its modules are chained, one for each depth, and read the state before the norm"),
    **dict.fromkeys(("nemotron_h", "nemotron_h_omni"), "its module has several blocks of different kinds"),
    "glm4_moe_lite": "its block's attention is not tested here",
}


def layout_of(model_type: str) -> OwnModule:
    """Raises UserError for an architecture without a known layout."""
    if model_type in LAYOUTS:
        return LAYOUTS[model_type]
    reason = OTHERS.get(model_type, f"layouts are known for {', '.join(LAYOUTS)}")
    raise UserError(
        f"drafter.source=target takes the MTP module out of the target's checkpoint, and the target is a {model_type}: "
        f"{reason}; set drafter.source=fresh, or train drafter=mtp"
    )


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A stored tensor, and its place in one of ours."""

    name: str
    expert: int | None = None
    first: int = 0  # of its rows
    last: int | None = None  # excluded; None: the last one

    def of(self, tensor: Tensor) -> Tensor:
        """The piece of our tensor, as a view."""
        return (tensor if self.expert is None else tensor[self.expert])[self.first : self.last]


@dataclass(frozen=True, slots=True)
class Numbered:
    """The layout of one of a target's modules."""

    layout: OwnModule
    blocks: int  # of the target
    number: int = 0

    def prefix(self, text: str) -> str:
        return text.format(layer=self.blocks + self.number, number=self.number)

    def pieces(self, name: str, shape: torch.Size, fused: bool = False) -> list[StoredPiece]:
        """The stored tensors that make up ours of this name and shape.

        fused: experts are stored as transformers keeps them, [E, 2I, H] and [E, H, I]; else each expert has three matrices.
        """
        module_name, _, suffix = name.partition(".")
        if module_name != BLOCK:
            return [StoredPiece(f"{self.prefix(self.layout.around)}{self.layout.parts.get(module_name, module_name)}.{suffix}")]
        prefix, (owner, _, last) = self.prefix(self.layout.block), suffix.rpartition(".")
        if fused or last not in FUSED or len(shape) != 3:
            return [StoredPiece(prefix + suffix)]
        experts = range(shape[0])
        if last == "down_proj":
            return [StoredPiece(f"{prefix}{owner}.{e}.down_proj.weight", e) for e in experts]
        half = shape[1] // 2
        rows = {"gate_proj": (0, half), "up_proj": (half, shape[1])}
        return [
            StoredPiece(f"{prefix}{owner}.{e}.{matrix}.weight", e, *bounds) for e in experts for matrix, bounds in rows.items()
        ]

    @property
    def projection(self) -> str:
        """The stored name of eh_proj, which tells whether files have the module."""
        return self.pieces("eh_proj.weight", torch.Size())[0].name

    def stored_as(self, stored: StoredTensors, expected: Mapping[str, Tensor]) -> dict[str, list[StoredPiece]]:
        """The pieces of each tensor that are in the files, by our names. expected: tensors of our shapes.

        Raises UserError where the files have no module, or one that lacks some of its tensors.
        """
        stored_pieces = {}
        for name, tensor in expected.items():
            fused_pieces = self.pieces(name, tensor.shape, True)
            stored_pieces[name] = fused_pieces if fused_pieces[0].name in stored else self.pieces(name, tensor.shape)
        names = [piece.name for row in stored_pieces.values() for piece in row]
        missing = [name for name in names if name not in stored]
        if len(missing) == len(names):
            raise UserError(
                f"drafter.source=target: {stored.directory} has no MTP module (no tensor {names[0]!r}, and none of its other "
                f"{len(names) - 1}); name a checkpoint that has one, drafter.source=DIR, or set drafter.source=fresh"
            )
        if missing:
            raise UserError(
                f"the MTP module in {stored.directory} lacks {', '.join(missing[:3])}"
                f"{' and others' if len(missing) > 3 else ''}; get its files again"
            )
        return stored_pieces

    @torch.no_grad()
    def fill(self, module: nn.Module, stored: StoredTensors) -> None:
        """Fill every tensor of a module from the files. Raises UserError for a tensor that is missing or does not fit."""
        tensors = module.state_dict()
        for name, pieces in self.stored_as(stored, tensors).items():
            for piece in pieces:
                tensor, destination = stored.read(piece.name), piece.of(tensors[name])
                if tensor.shape != destination.shape:
                    raise UserError(
                        f"{stored.directory}: {piece.name} is {list(tensor.shape)}, the target's configuration gives "
                        f"{list(destination.shape)}; get its files again, or mend config.json"
                    )
                if not tensor.is_floating_point() or tensor.element_size() < 2:
                    raise UserError(
                        f"{stored.directory}: {piece.name} is stored as {str(tensor.dtype).removeprefix('torch.')}, which is "
                        "not trained; give a checkpoint in bfloat16"
                    )
                destination.copy_(tensor)


def count_of(layout: OwnModule, blocks: int, stored: StoredTensors) -> int:
    """How many modules the files have, one for each depth; 1 where they have none, which filling it reports."""
    count = 0
    while Numbered(layout, blocks, count).projection in stored and (count == 0 or layout.several):
        count += 1
    return max(1, count)


def open_source(directory: Path | None, origin: str) -> StoredTensors:
    """The files to read a module from. Raises UserError where there are none."""
    if directory is None:
        raise UserError(f"{origin}: the target was not loaded from a directory, so its MTP module cannot be read; set one")
    return StoredTensors.of(directory, origin)
