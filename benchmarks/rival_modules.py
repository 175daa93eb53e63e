"""Other toolkits' EAGLE-3 modules with our drafter's weights, batch and states of the target: forward and loss.

Each module runs as its own training would run it on the device. On a GPU: SpecForge's compiled flex attention and its Triton
loss; speculators' forward compiled as a whole, flex attention, and its fused Triton loss. On a CPU: sdpa attention and the
losses in torch, and speculators' mask is built at once, not place by place, which would take a third of a step. All three train
the same weights, the head's too.

Shapes: B rows, T positions, N positions of all rows, H hidden, X states side by side, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig

from drafttrain.features.online import Online
from drafttrain.model.batch import TrainBatch
from drafttrain.model.target import FINAL, Taps


@dataclass(frozen=True, slots=True)
class Given:
    """Our drafter, which a rival's module gets the weights of, and what a step reads. batch: with the target's states."""

    drafter: Any
    target: Any
    batch: TrainBatch
    steps: int
    config: dict[str, Any]  # of a LlamaConfig with the target's shape

    @property
    def on_gpu(self) -> bool:
        return self.batch.token_BT.is_cuda

    @property
    def layer(self) -> LlamaConfig:
        return LlamaConfig(**self.config | {"num_hidden_layers": 1})

    @property
    def states_BTX(self) -> Tensor:
        return torch.cat([self.batch.hidden[block] for block in self.drafter.taps.blocks], -1)

    @property
    def ends(self) -> tuple[Tensor, Tensor, Tensor]:
        """The target's embeddings, the weight of its last norm, and of its head."""
        model = self.target.model
        return model.get_input_embeddings().weight, model.model.norm.weight, model.lm_head.weight


class Rival(ABC):
    """Another toolkit's module."""

    def __init__(self, given: Given) -> None:
        self.given = given
        weight = next(given.drafter.parameters())
        with weight.device:
            self.module = self.made().to(weight).train()

    @abstractmethod
    def made(self) -> nn.Module:
        """The module, with the drafter's weights."""

    @abstractmethod
    def loss(self) -> Tensor:
        """The sum of the steps' mean losses, each times the drafter's weight of the step."""

    def load(self, module: nn.Module, renames: dict[str, str], missing: set[str]) -> None:
        """The drafter's weights. missing: parts of the module that the drafter does not own."""
        own = {name: value for name, value in self.given.drafter.state_dict().items() if value is not None}
        for old, new in renames.items():
            own = {name.replace(old, new, 1) if name.startswith(old) else name: value for name, value in own.items()}
        found = module.load_state_dict(own, strict=False)
        assert set(found.missing_keys) <= missing and not found.unexpected_keys, found

    def norm(self) -> float:
        """Of all gradients, of a sum over positions as in the drafter's own loss."""
        gradients = [p.grad.float() for p in self.module.parameters() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients)) * self.given.batch.token_BT.numel()


class SpecForge(Rival):
    def made(self) -> nn.Module:
        from specforge.algorithms.eagle3 import model as eagle3
        from specforge.core.loss import LogSoftmaxLoss, _compute_loss
        from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3

        given = self.given
        eagle3.LogSoftmaxLoss = LogSoftmaxLoss if given.on_gpu else SimpleNamespace(apply=_compute_loss)
        attention = "flex_attention" if given.on_gpu else "sdpa"
        config = given.layer
        config.draft_vocab_size, config.pad_token_id = given.drafter.lm_head.out_features, 0
        config.rope_theta, config.rope_scaling = config.rope_parameters["rope_theta"], None
        draft = LlamaForCausalLMEagle3(config, attention_backend=attention)
        self.load(draft, {}, {"embed_tokens.weight", "t2d", "d2t"})
        draft.embed_tokens.weight.data.copy_(given.ends[0])
        draft.freeze_embedding()
        found: nn.Module = eagle3.OnlineEagle3Model(draft, length=given.steps, attention_backend=attention)
        return found

    def loss(self) -> Tensor:
        batch = self.given.batch
        with torch.no_grad():
            logits_BTV = self.given.target.head(batch.hidden[FINAL])
        shifted = [F.pad(x[:, 1:], (0, 1)) for x in (batch.token_BT, batch.mask_BT)]
        losses = self.module(
            input_ids=shifted[0],
            attention_mask=torch.ones_like(batch.token_BT),
            target=F.pad(logits_BTV[:, 1:], (0, 0, 0, 1)),
            loss_mask=shifted[1][..., None].int(),
            hidden_states=self.given.states_BTX,
        )[0]
        return torch.stack([self.given.drafter.decay**i * loss for i, loss in enumerate(losses)]).sum()


class Speculators(Rival):
    def made(self) -> nn.Module:
        from speculators.config import SpeculatorsConfig, VerifierConfig
        from speculators.losses import resolve_loss_config
        from speculators.models.eagle3.config import Eagle3SpeculatorConfig
        from speculators.models.eagle3.core import Eagle3DraftModel
        from speculators.proposals.greedy import GreedyTokenProposalConfig

        given, config = self.given, self.given.layer
        config._attn_implementation = "simple_flex_attention" if given.on_gpu else "sdpa"
        made = Eagle3SpeculatorConfig(
            transformer_layer_config=config,
            draft_vocab_size=given.drafter.lm_head.out_features,
            eagle_aux_hidden_state_layer_ids=[block + 1 for block in given.drafter.taps.blocks],
            speculators_config=SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=given.steps)],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=[]),
            ),
        )
        model: Any = Eagle3DraftModel(made)
        if not given.on_gpu:
            model._create_mask_fn = dense_mask
        ours = {f"verifier_{part}.weight" for part in ("norm", "lm_head")} | {"embed_tokens.weight", "t2d", "d2t"}
        self.load(model, {"midlayer.": "layers.0."}, ours)
        model.lm_head.weight.requires_grad_(True)  # as in the other two; its own training freezes it
        embedding, norm, head = given.ends
        model.embed_tokens.weight.data.copy_(embedding)
        model.verifier_norm.weight.data.copy_(norm)
        model.verifier_lm_head.weight.data.copy_(head if given.drafter.ids is None else head[given.drafter.ids])
        last = given.target.shape.blocks - 1
        with torch.no_grad():
            self.last_BTH = Online(given.target, Taps((last,))).fill(given.batch).hidden[last]
        self.arguments = {"ttt_steps": given.steps, "ttt_step_loss_decay": given.drafter.decay}
        self.arguments["loss_config"] = resolve_loss_config("kl_div", "fused" if given.on_gpu else "eager")
        found: nn.Module = model
        return found

    def loss(self) -> Tensor:
        """All rows side by side, as its collation puts them; the position that a row lacks at its end is of no document."""
        batch, (B, T) = self.given.batch, self.given.batch.token_BT.shape
        row_BT = torch.arange(B, device=batch.token_BT.device)[:, None].expand(B, T)
        given = {
            "hidden_states": self.given.states_BTX,
            "input_ids": F.pad(batch.token_BT[:, 1:], (0, 1)),
            "document_ids": torch.where(F.pad(batch.mask_BT[:, 1:], (0, 1)), row_BT, -1),
            "loss_mask": F.pad(batch.mask_BT[:, 1:], (0, 1)),
            "position_ids": batch.position_BT + 1,
            "verifier_last_hidden_states": F.pad(self.last_BTH[:, 1:], (0, 0, 0, 1)),
        }
        found: Tensor = self.module(**{name: x.flatten(0, 1)[None] for name, x in given.items()}, **self.arguments)[1]
        return found


def dense_mask(seen: Any, Q_LEN: int, KV_LEN: int, **_: Any) -> Tensor:
    """[1, 1, Q, KV] of the module's rule, built at once."""
    zero, query_Q1, key_1K = torch.zeros((), dtype=torch.long), torch.arange(Q_LEN)[:, None], torch.arange(KV_LEN)[None]
    found: Tensor = seen(zero, zero, query_Q1, key_1K)
    return found.expand(1, 1, Q_LEN, KV_LEN)


RIVALS: dict[str, type[Rival]] = {"specforge": SpecForge, "speculators": Speculators}
