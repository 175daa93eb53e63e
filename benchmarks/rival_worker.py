"""A step of another toolkit's EAGLE-3 module, with the weights, batch and target's states of `step_worker.Case`.

    python benchmarks/rival_worker.py NAME      NAME: specforge or speculators; started by `benchmarks/rival_steps.py`

Each module runs as its own training on a CPU would run it: SpecForge's sdpa attention and the compiled form of its loss, since
its Triton kernels need a GPU; speculators' sdpa attention and eager losses. What both lack on a CPU is not charged to them:
speculators' mask is built at once, not place by place, which would take a third of a step.

Shapes: B rows, T positions, N positions of all rows, H hidden, V vocabulary.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from types import SimpleNamespace
from typing import Any

import torch
from step_worker import Case, main
from torch import Tensor, nn

from drafttrain.features.online import Online
from drafttrain.model.target import FINAL, Taps
from drafttrain.targets.hf import HFTarget


class Rival(Case, ABC):
    """The case with another module, which has the same weights."""

    def __init__(self, asked: dict[str, Any]) -> None:
        super().__init__(asked)
        self.options, self.target = asked["options"], self.objective._target.module
        assert isinstance(self.target, HFTarget)
        self.dtype, self.blocks = next(self.drafter.parameters()).dtype, list(self.drafter.taps.blocks)
        self.module = self.made(asked).to(self.dtype).train()

    @abstractmethod
    def made(self, asked: dict[str, Any]) -> nn.Module:
        """The other toolkit's module, with the drafter's weights."""

    @abstractmethod
    def loss(self) -> Tensor:
        """The sum of the steps' mean losses, each times the drafter's weight of the step."""

    def load(self, module: nn.Module, renames: dict[str, str], missing: set[str]) -> None:
        """The drafter's weights. missing: parts of the module that the drafter does not own."""
        own = {name: value for name, value in self.drafter.state_dict().items() if value is not None}
        for old, new in renames.items():
            own = {name.replace(old, new, 1) if name.startswith(old) else name: value for name, value in own.items()}
        found = module.load_state_dict(own, strict=False)
        assert set(found.missing_keys) <= missing and not found.unexpected_keys, found

    def step(self) -> float:
        self.module.zero_grad()
        loss = self.loss()
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def norm(self) -> float:
        """Of all gradients, of a sum over positions as in the drafter's own loss."""
        gradients = [p.grad.float() for p in self.module.parameters() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients)) * self.batch.token_BT.numel()


class SpecForge(Rival):
    def made(self, asked: dict[str, Any]) -> nn.Module:
        from specforge.algorithms.eagle3 import model as eagle3
        from specforge.core.loss import _compute_loss
        from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
        from transformers import LlamaConfig

        eagle3.LogSoftmaxLoss = SimpleNamespace(apply=_compute_loss)
        vocab = self.drafter.lm_head.out_features
        config = LlamaConfig(**asked["model"] | {"num_hidden_layers": 1}, draft_vocab_size=vocab, pad_token_id=0)
        config.rope_theta, config.rope_scaling = 10_000.0, None
        draft = LlamaForCausalLMEagle3(config)
        self.load(draft, {}, {"embed_tokens.weight", "t2d", "d2t"})
        draft.embed_tokens.weight.data.copy_(self.target.model.get_input_embeddings().weight)
        draft.freeze_embedding()
        found: nn.Module = eagle3.OnlineEagle3Model(draft, length=self.options["steps"])
        return found

    def loss(self) -> Tensor:
        batch = self.batch
        with torch.no_grad():
            logits_BTV = self.target.head(batch.hidden[FINAL])
        shifted = [torch.nn.functional.pad(x[:, 1:], (0, 1)) for x in (batch.token_BT, batch.mask_BT)]
        losses = self.module(
            input_ids=shifted[0],
            attention_mask=torch.ones_like(batch.token_BT),
            target=torch.nn.functional.pad(logits_BTV[:, 1:], (0, 0, 0, 1)),
            loss_mask=shifted[1][..., None].int(),
            hidden_states=torch.cat([batch.hidden[b] for b in self.blocks], -1),
        )[0]
        return torch.stack([self.drafter.decay**i * loss for i, loss in enumerate(losses)]).sum()


class Speculators(Rival):
    def made(self, asked: dict[str, Any]) -> nn.Module:
        from speculators.config import SpeculatorsConfig, VerifierConfig
        from speculators.losses import resolve_loss_config
        from speculators.models.eagle3.config import Eagle3SpeculatorConfig
        from speculators.models.eagle3.core import Eagle3DraftModel
        from speculators.proposals.greedy import GreedyTokenProposalConfig
        from transformers import LlamaConfig

        config = LlamaConfig(**asked["model"] | {"num_hidden_layers": 1})
        config._attn_implementation = "sdpa"
        steps = self.options["steps"]
        made = Eagle3SpeculatorConfig(
            transformer_layer_config=config,
            draft_vocab_size=self.drafter.lm_head.out_features,
            eagle_aux_hidden_state_layer_ids=[block + 1 for block in self.blocks],
            speculators_config=SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=steps)],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=[]),
            ),
        )
        model: Any = Eagle3DraftModel(made)
        model._create_mask_fn = dense_mask
        ours = {f"verifier_{part}.weight" for part in ("norm", "lm_head")} | {"embed_tokens.weight", "t2d", "d2t"}
        self.load(model, {"midlayer.": "layers.0."}, ours)
        of = self.target.model
        model.embed_tokens.weight.data.copy_(of.get_input_embeddings().weight)
        model.verifier_norm.weight.data.copy_(of.model.norm.weight)
        model.verifier_lm_head.weight.data.copy_(of.lm_head.weight)
        last = self.target.shape.blocks - 1
        with torch.no_grad():
            self.last_BTH = Online(self.target, Taps((last,))).fill(self.batch).hidden[last]
        self.arguments = {"ttt_steps": steps, "ttt_step_loss_decay": self.drafter.decay}
        self.arguments["loss_config"] = resolve_loss_config("kl_div", "eager")
        found: nn.Module = model
        return found

    def loss(self) -> Tensor:
        batch, (B, T) = self.batch, self.batch.token_BT.shape
        states_BTX = torch.cat([batch.hidden[b] for b in self.blocks], -1)
        row_B1 = torch.arange(B)[:, None]
        given = {
            "hidden_states": states_BTX[:, :-1],
            "input_ids": batch.token_BT[:, 1:],
            "document_ids": row_B1.expand(B, T - 1),
            "loss_mask": batch.mask_BT[:, 1:],
            "position_ids": batch.position_BT[:, 1:],
            "verifier_last_hidden_states": self.last_BTH[:, 1:],
        }
        found: Tensor = self.module(**{name: x.flatten(0, 1)[None] for name, x in given.items()}, **self.arguments)[1]
        return found


def dense_mask(seen: Any, Q_LEN: int, KV_LEN: int, **_: Any) -> Tensor:
    """[1, 1, Q, KV] of the module's rule, built at once."""
    zero, query_Q1, key_1K = torch.zeros((), dtype=torch.long), torch.arange(Q_LEN)[:, None], torch.arange(KV_LEN)[None]
    found: Tensor = seen(zero, zero, query_Q1, key_1K)
    return found.expand(1, 1, Q_LEN, KV_LEN)


RIVALS: dict[str, type[Rival]] = {"specforge": SpecForge, "speculators": Speculators}

if __name__ == "__main__":
    main(RIVALS[sys.argv[1]])
