"""A transformers model that another loop trains, as the target of a drafter that follows it.

No weight is copied, joined or packed: embedding, norm and head are called through the model's own modules, so that a call
always uses the weights of that moment. The model's parameters get no gradients from it, and its modules keep their modes.

Shapes: B rows, N positions, R logit rows, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from drafttrain.core.errors import UserError
from drafttrain.model.drafter import FrozenRef
from drafttrain.model.kv_cache import KVCache
from drafttrain.model.low_rank import LowRank
from drafttrain.model.masks import Documents
from drafttrain.model.target import FINAL, Taps, TargetOut
from drafttrain.targets.hf import HFTarget
from drafttrain.targets.shallow import final_norm, weight_sharing_copy
from drafttrain.targets.structure import find_backbone, find_blocks, fingerprint_of, is_recurrent, scale_of, shape_of


def unwrapped(model: Any) -> PreTrainedModel:
    """The transformers model inside of wrappers: DistributedDataParallel, torch.compile, peft.

    Raises UserError for something else, and for weights that are divided among processes.
    """
    candidate = model
    while not isinstance(candidate, PreTrainedModel):
        if callable(base := getattr(candidate, "get_base_model", None)):
            candidate = base()
        elif isinstance(inner := getattr(candidate, "_orig_mod", getattr(candidate, "module", None)), nn.Module):
            candidate = inner
        else:
            raise UserError(f"the target is a {type(model).__name__}; give a transformers causal LM, a path or a configuration")
    sharded_names = [name for name, p in candidate.named_parameters() if hasattr(p, "ds_id") or hasattr(p, "device_mesh")]
    if sharded_names or any("FSDP" in type(module).__name__ for module in candidate.modules()):
        raise UserError(
            "the target's weights are divided among processes; give its path or configuration instead, and the weights of its "
            "embedding, norm and head by set_ends"
        )
    return candidate


def without_gradients(module: nn.Module, x: Tensor) -> Tensor:
    """The module's output, whose gradient flows to x alone. It uses the parameters' own memory."""
    out: Tensor = functional_call(module, {name: p.detach() for name, p in module.named_parameters()}, (x,))
    return out


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards every module has its own mode again."""
    training_modules = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training_modules:
            module.training = True


class LiveTarget:
    """The Target protocol over a model whose weights change. It runs whole sequences; `frozen` gives a target that decodes."""

    name = "live"
    generations = False
    captured = False
    whole_images = False
    placeholder: int | None = None
    outline = False
    chains_reason: str | None = None

    def __init__(self, model: Any, stop_ids: frozenset[int] = frozenset(), tokenizer: Any = None) -> None:
        self.outer: Any = model  # as it was given, with its wrappers; the loop calls this one
        self.model: Any = unwrapped(model)
        self.stop_ids, self.tokenizer = stop_ids, tokenizer
        config = self.model.config.get_text_config()
        self.recurrent = is_recurrent(self.model)
        self.shape, self.trees = shape_of(config), not self.recurrent
        self.backbone: FrozenRef[Any] = FrozenRef(find_backbone(self.model, self.shape.blocks))
        self._norm: FrozenRef[nn.Module] | None = None  # found on first use: not every model has one
        self._scale, self._softcap = scale_of(config), getattr(config, "final_logit_softcapping", None)
        self._frozen: tuple[list[tuple[Any, ...]], HFTarget] | None = None  # with the places of the weights that it reads

    @property
    def device(self) -> torch.device:
        device: torch.device = self._head.weight.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._head.weight.dtype
        return dtype

    @property
    def fingerprint(self) -> str:
        """Of the weights at this moment."""
        return fingerprint_of(self.model)

    @property
    def _head(self) -> Any:
        return self.model.get_output_embeddings()

    @property
    def head_weight(self) -> Tensor:
        weight_VH: Tensor = self._head.weight.detach()
        return weight_VH if self._scale == 1.0 else weight_VH * self._scale

    def embed(self, token: Tensor) -> Tensor:
        return without_gradients(self.model.get_input_embeddings(), token).detach()  # hooks of checkpointing ask for gradients

    def head(self, hidden_H: Tensor) -> Tensor:
        logits_V = without_gradients(self._head, hidden_H)
        if self._scale != 1.0:
            logits_V = logits_V * self._scale
        return logits_V if self._softcap is None else torch.tanh(logits_V / self._softcap) * self._softcap

    def norm(self, hidden_H: Tensor) -> Tensor:
        return without_gradients(self.norm_module, hidden_H)

    @property
    def norm_module(self) -> nn.Module:
        """The norm before the head."""
        if self._norm is None:
            self._norm = FrozenRef(final_norm(self.model, self.shape.blocks))
        return self._norm.module

    @torch.no_grad()
    def __call__(
        self,
        token_BN: Tensor,
        kv: KVCache | None,
        ancestor_BNN: Tensor | Documents | None,
        position_BN: Tensor,
        taps: Taps,
        logit_row_BR: Tensor | None = None,
    ) -> TargetOut:
        """Run whole right-padded sequences of one document each, in evaluation mode."""
        assert kv is None and ancestor_BNN is None, "`frozen` decodes, and trees and packed rows need a mask"
        hidden: dict[int, Tensor] = {}
        handles = [
            block.register_forward_hook(_keep(hidden, number))
            for number, block in enumerate(find_blocks(self.model, self.shape.blocks))
            if number in taps.blocks
        ]
        try:
            with evaluating(self.model):
                final_BNH = self.backbone.module(input_ids=token_BN, use_cache=False).last_hidden_state
        finally:
            for handle in handles:
                handle.remove()
        if taps.final:
            hidden[FINAL] = final_BNH
        if logit_row_BR is not None and logit_row_BR.shape[1] == 0:
            return TargetOut(None, hidden)
        if logit_row_BR is not None:
            final_BNH = final_BNH.gather(1, logit_row_BR[..., None].expand(-1, -1, final_BNH.shape[-1]))
        return TargetOut(self.head(final_BNH), hidden)

    def frozen(self) -> HFTarget:
        """A target over the same memory that decodes. It is made again where the model's parameters are elsewhere."""
        addresses = [(p.data_ptr(), p.dtype, tuple(p.shape)) for p in self.model.parameters()]
        if self._frozen is None or self._frozen[0] != addresses:
            frozen_target = HFTarget(weight_sharing_copy(self.model, hooks=False), self.stop_ids)
            frozen_target.tokenizer = self.tokenizer
            self._frozen = addresses, frozen_target
        self._frozen[1].fingerprint = self.fingerprint
        return self._frozen[1]

    def new_cache(self, slots: int, max_len: int, pages: int | None = None) -> KVCache:
        return self.frozen().new_cache(slots, max_len, pages)

    def shallow(self, blocks: int) -> HFTarget:
        """Its first blocks over the same memory."""
        return self.frozen().shallow(blocks)

    def pruned(self, blocks: int) -> HFTarget:
        return self.frozen().pruned(blocks)

    def with_added(self, added: Mapping[str, LowRank]) -> HFTarget:
        raise UserError("this drafter adds matrices to the target's own linear maps, and a target that changes is not run so")


def _keep(hidden: dict[int, Tensor], number: int) -> Any:
    def keep(module: nn.Module, args: Any, output: Any) -> None:
        hidden[number] = output[0] if isinstance(output, tuple) else output

    return keep
