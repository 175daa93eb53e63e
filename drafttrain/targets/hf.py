"""Any transformers causal LM as a Target: trees use a 4-D mask and explicit positions, taps use hooks.

Shapes: B rows, N new positions, P cached + new positions, R logit rows, H hidden, V vocabulary.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import Cache, PreTrainedModel

from drafttrain.core.errors import UserError
from drafttrain.model.frozen_ref import FrozenRef
from drafttrain.model.kv_cache import KVCache
from drafttrain.model.masks import Documents, additive, attention_mask
from drafttrain.model.target import FINAL, PrunedTarget, Taps, TargetOut
from drafttrain.targets.attention import install
from drafttrain.targets.fingerprint import fingerprint_of
from drafttrain.targets.parallel import WHOLE, Part
from drafttrain.targets.probe import probe, reference_logits
from drafttrain.targets.shallow import check_first, final_norm, first_blocks
from drafttrain.targets.structure import find_blocks, lacking, set_depth, shape_of
from drafttrain.targets.substitute import restore, substitute


class SlotCache(Cache):
    """Our KV cache behind transformers' interface: layers write scratch positions and read the whole row back."""

    def __init__(self, kv: KVCache) -> None:
        super().__init__(layers=[])
        self.kv = kv

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of different widths, as in latent attention, are stored in rows of the larger width."""
        wide, narrow = key_states.shape[-1], value_states.shape[-1]
        if wide == narrow:
            self.kv.append(layer_idx, key_states, value_states)
            return self.kv.read(layer_idx, key_states.shape[2])
        most = max(wide, narrow)
        self.kv.append(layer_idx, *(pad(x, (0, most - x.shape[-1])) for x in (key_states, value_states)))
        k_BhPD, v_BhPD = self.kv.read(layer_idx, key_states.shape[2])
        return k_BhPD[..., :wide], v_BhPD[..., :narrow]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.kv.longest

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.kv.longest + query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.kv.longest

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * self.kv.layers

    @property
    def is_compileable(self) -> bool:
        return False


class HFTarget(PrunedTarget):
    """Runs transformers' `model` unchanged. It is frozen and in eval mode unless it is a `pruned` copy.

    Raises UserError when the model's own logits are not `head(final state)`, or when decoding with a cache differs from a
    forward without one. An architecture that fails only with tree masks gets `trees = False`.
    """

    name = "hf"
    hooked = True  # hooks on the blocks record the taps
    captured = False  # not run in CUDA graphs: transformers' forward may not allow it
    bits: int | None = None  # quantisation of the weights that a trainable copy decodes with; None: not quantised
    joins = False  # decodes with joined copies of its weights
    outline = False  # has no weights, only shapes
    part: Part = WHOLE  # the part that this process holds
    tokenizer: Any = None  # the tokenizer that was loaded with the model

    def __init__(self, model: PreTrainedModel, stop_ids: frozenset[int] = frozenset(), frozen: bool = True) -> None:
        super().__init__()
        self.model, self.frozen = model, frozen
        self.stop_ids, self.trees = stop_ids, True
        config = model.config.get_text_config()
        self.shape = shape_of(config)
        self.backbone: FrozenRef[Any] = FrozenRef(model.base_model)
        self._norm: FrozenRef[nn.Module] | None = None  # the norm before the head, found on first use
        self._captured: dict[int, Tensor] = {}
        self._wanted: frozenset[int] = frozenset()
        blocks = find_blocks(model, self.shape.blocks)
        for number, block in enumerate(blocks if self.hooked else ()):
            block.register_forward_hook(self._hook(number))
        self._layer_types = set(getattr(config, "layer_types", None) or ())
        self._window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        self._softcap = getattr(config, "final_logit_softcapping", None)
        self._accepts = frozenset(inspect.signature(model.base_model.forward).parameters)
        self.unmasked = False  # whole sequences need no mask tensor
        self.fingerprint = ""
        if frozen:
            model.requires_grad_(False).eval()
            self.fingerprint = self._fingerprint()
        self._prepare()
        self.unmasked = self._install_attention()
        if frozen:
            try:
                self.trees = probe(self)
            except UserError:
                raise
            except Exception as error:  # a model may raise anything when it does not support this cache or mask
                reason = lacking(model) or f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
                raise UserError(
                    f"{type(model).__name__} cannot decode with our KV cache ({reason}); choose another target"
                ) from error

    def _prepare(self) -> None:
        """Set up another runner of the same modules before its first forward."""

    def _install_attention(self) -> bool:
        """Returns whether whole sequences run without a mask."""
        return install(self)

    def _fingerprint(self) -> str:
        return fingerprint_of(self.model)

    def reference_logits(self) -> dict[tuple[int, ...], Tensor]:
        """Logits of the model's own forward for the probe's sequences."""
        return reference_logits(self.model)

    def __call__(self, *args: Any, **kwargs: Any) -> TargetOut:
        """Calls `forward` directly, because module hooks such as DeepSpeed's do not support TargetOut."""
        return self.forward(*args, **kwargs)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def head_weight(self) -> Tensor:
        return self.model.get_output_embeddings().weight

    def _hook(self, number: int) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            if number in self._wanted:
                self._captured[number] = output[0] if isinstance(output, tuple) else output

        return keep

    def embed(self, token: Tensor) -> Tensor:
        return self.model.get_input_embeddings()(token)

    def head(self, hidden_H: Tensor) -> Tensor:
        logits_V = self.model.get_output_embeddings()(hidden_H)
        if self._softcap is not None:
            logits_V = torch.tanh(logits_V / self._softcap) * self._softcap
        return logits_V

    def forward(
        self,
        token_BN: Tensor,
        kv: KVCache | None,
        ancestor_BNN: Tensor | Documents | None,
        position_BN: Tensor,
        taps: Taps,
        logit_row_BR: Tensor | None = None,
    ) -> TargetOut:
        inputs: dict[str, Any] = {"input_ids": token_BN}
        if "position_ids" in self._accepts:
            inputs["position_ids"] = position_BN
        inputs["use_cache"] = kv is not None
        if kv is not None:
            inputs["past_key_values"] = SlotCache(kv)
        if kv is None and self.unmasked and not isinstance(ancestor_BNN, Tensor):
            inputs |= {"whole": True, "documents": ancestor_BNN}
            inputs["attention_mask"] = self._by_layer(token_BN.new_zeros(1, 1, 1, 1))  # given, so that transformers builds none
        elif kv is not None or ancestor_BNN is not None:
            inputs["attention_mask"] = self._mask(kv, ancestor_BNN, position_BN)
        self._captured, self._wanted = {}, frozenset(taps.blocks)
        final_BNH = self.backbone.module(**inputs).last_hidden_state
        hidden, self._captured, self._wanted = self._captured, {}, frozenset()
        return self._output(final_BNH, hidden, taps, logit_row_BR)

    def _output(self, final_BNH: Tensor, hidden: dict[int, Tensor], taps: Taps, logit_row_BR: Tensor | None) -> TargetOut:
        if taps.final:
            hidden[FINAL] = final_BNH
        if logit_row_BR is None:
            return TargetOut(self.head(final_BNH), hidden)
        if logit_row_BR.shape[1] == 0:
            return TargetOut(None, hidden)
        rows_BRH = final_BNH.gather(1, logit_row_BR[..., None].expand(-1, -1, final_BNH.shape[-1]))
        return TargetOut(self.head(rows_BRH), hidden)

    def _mask(self, kv: KVCache | None, ancestor_BNN: Tensor | Documents | None, position_BN: Tensor) -> Any:
        """Additive mask, [B, 1, N, P]; for models that mix full and sliding layers, one per layer type."""
        full = additive(attention_mask(kv, ancestor_BNN, position_BN, None), self.dtype)
        if self._window is None:
            return full
        return self._by_layer(full, additive(attention_mask(kv, ancestor_BNN, position_BN, self._window), self.dtype))

    def _by_layer(self, full: Tensor, sliding: Tensor | None = None) -> Any:
        """Masks as the model takes them: one for all layers, or one per layer type. sliding: with a window; None: the same."""
        sliding = full if sliding is None else sliding
        if self._window is None:
            return full
        return {"full_attention": full, "sliding_attention": sliding} if self._layer_types else sliding

    def new_cache(self, slots: int, max_len: int, pages: int | None = None) -> KVCache:
        if not self.frozen and not self.training and not self.joins:
            substitute(self.model, self.bits)
        return KVCache(self.shape.blocks, slots, max_len, self.device, pages)

    def norm(self, hidden_H: Tensor) -> Tensor:
        if self._norm is None:
            self._norm = FrozenRef(final_norm(self.model, self.shape.blocks))
        return self._norm.module(hidden_H)

    def shallow(self, blocks: int) -> HFTarget:
        check_first(self.shape.blocks, blocks)
        return self._view(first_blocks(self.model, self.shape.blocks, blocks))

    def _view(self, model: PreTrainedModel) -> HFTarget:
        return HFTarget(model, self.stop_ids)

    def pruned(self, blocks: int) -> HFTarget:
        """A trainable copy of the first `blocks` blocks with embedding, norm and head."""
        if not 1 <= blocks <= self.shape.blocks:
            raise UserError(f"drafter.blocks is {blocks}; the target has {self.shape.blocks}, choose 1..{self.shape.blocks}")
        config = copy.deepcopy(self.model.config)
        set_depth(config, blocks)
        model: Any = type(self.model)(config)
        missing = model.load_state_dict(self.model.state_dict(), strict=False).missing_keys
        assert not missing, f"a pruned copy lacks {missing}"
        return self._trainable(model.to(self.device, torch.float32))

    def outline_of(self, model: PreTrainedModel) -> HFTarget:
        """A target without weights of another model. Only targets without weights have this."""
        raise AssertionError("only a target without weights can create another one")

    def _trainable(self, model: PreTrainedModel) -> HFTarget:
        return type(self)(model, self.stop_ids, frozen=False)

    def adapt(self, rank: int, alpha: int) -> None:
        """Add low-rank adapters to all linear maps except the head. From then on only they are trained (arXiv 2106.09685)."""
        from peft import LoraConfig, inject_adapter_in_model

        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # peft warns when it detects a transposed weight
            inject_adapter_in_model(config, self.model)
        self._prepare()

    def recompute(self) -> None:
        model: Any = self.model
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)  # transformers < 5.23
        enable({"use_reentrant": False})

    def free(self) -> None:
        """Release the weights' memory. The target cannot compute afterwards."""
        self.model.to("meta")  # type: ignore[arg-type]

    def train(self, mode: bool = True) -> HFTarget:
        super().train(mode)
        if mode:
            restore(self.model)
        return self
