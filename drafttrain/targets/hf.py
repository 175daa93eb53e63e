"""Any transformers causal LM as a Target: trees use a 4-D mask and explicit positions, taps use hooks.

Shapes: B rows, N new positions, P cached + new positions, R logit rows, H hidden, V vocabulary.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from drafttrain.core.errors import UserError
from drafttrain.model.drafter import FrozenRef
from drafttrain.model.joint import restore, substitute
from drafttrain.model.kv_cache import KVCache
from drafttrain.model.low_rank import LowRank
from drafttrain.model.masks import Documents
from drafttrain.model.recurrent_state import States, UnknownScanError
from drafttrain.model.target import FINAL, PrunedTarget, Taps, TargetOut
from drafttrain.targets.attention import LayerMasks, install
from drafttrain.targets.parallel import WHOLE, Part
from drafttrain.targets.probe import INSTEAD, InexactError, Reference, probe, reference_of, why_not_captured, wrong_tap
from drafttrain.targets.quantised import check_whole
from drafttrain.targets.recurrent import Limits, Recorder, RowShape, SlotCache, extra_layers, recording
from drafttrain.targets.recurrent import install as record_scans
from drafttrain.targets.shallow import check_first, final_norm, first_blocks, narrowed, weight_sharing_copy
from drafttrain.targets.structure import (
    cache_argument,
    find_backbone,
    find_blocks,
    fingerprint_of,
    is_recurrent,
    lacking,
    scale_of,
    set_depth,
    shape_of,
)


@dataclass(frozen=True, slots=True)
class CacheBytes:
    """Memory of a decoding request."""

    position: int  # keys and values of one position
    states: int  # recurrent states, whatever the length


class Adding:
    """A hook that adds to a linear map's output. An object, because a copy of the model must copy what it refers to."""

    def __init__(self, added: LowRank) -> None:
        self.added = added

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + self.added(args[0])


class HFTarget(PrunedTarget):
    """Runs transformers' `model` unchanged. It is frozen and in eval mode unless it is a `pruned` copy.

    Raises UserError when the model's own logits are not `head(final state)`, or when decoding with a cache differs from a
    forward without one. An architecture that fails only with tree masks gets `trees = False`.
    """

    name = "hf"
    hooked = True  # hooks on the blocks record the taps
    generations = False
    bits: int | None = None  # quantisation of the weights that a trainable copy decodes with; None: not quantised
    joins = False  # decodes with joined copies of its weights
    outline = False  # has no weights, only shapes
    part: Part = WHOLE  # the part that this process holds
    shared_by = "target.tensor_parallel"  # the setting by which several processes share it
    tokenizer: Any = None  # the tokenizer that was loaded with the model
    has_adapters = False  # it is served with LoRA adapters too, each in a target of its own (`targets/adapters.py`)
    whole_images = False
    placeholder: int | None = None
    wrong_tap: int | None = None  # the first block whose output cannot be tapped; None: all can
    chains_reason: str | None = None  # why draft trees are not exact; None: they are, or the target was not probed

    def __init__(self, model: PreTrainedModel, stop_ids: frozenset[int] = frozenset(), frozen: bool = True) -> None:
        super().__init__()
        self.model, self.frozen = model, frozen
        self.recurrent = is_recurrent(model)
        self.stop_ids, self.trees = stop_ids, not self.recurrent
        config = model.config.get_text_config()
        self.shape = shape_of(config)
        self.backbone: FrozenRef[Any] = FrozenRef(find_backbone(model, self.shape.blocks))
        self._norm: FrozenRef[nn.Module] | None = None  # the norm before the head, found on first use
        self._captured: dict[int, Tensor] = {}
        self._wanted: frozenset[int] = frozenset()
        blocks = find_blocks(model, self.shape.blocks)
        for number, block in enumerate(blocks if self.hooked else ()):
            block.register_forward_hook(self._hook(number))
        self._scale, self._softcap = scale_of(config), getattr(config, "final_logit_softcapping", None)
        self._accepts = frozenset(inspect.signature(self.backbone.module.forward).parameters)
        self._cache_argument = cache_argument(self.backbone.module.forward)
        self.masks = LayerMasks(config)
        self._more_layers = extra_layers(config)  # of the cache, after those of the blocks
        self._row_shapes: dict[int, RowShape] = {}  # what each layer has written into a cache
        self._states: States = {}  # empty tensors of the recurrent layers' shapes, known after the first pass
        self._step_limits = self._record_scans()
        self.unmasked = False  # whole sequences need no mask tensor
        self._capture_reasons: dict[torch.device, str | None] = {}
        self.fingerprint = ""
        if frozen:
            model.requires_grad_(False).eval()
            self.fingerprint = self._fingerprint()
        self._prepare()
        self.unmasked = self._install_attention()
        if frozen:
            try:
                self.chains_reason = probe(self)
                self.trees = self.chains_reason is None
                self.wrong_tap = wrong_tap(self) if self.part.size == 1 or self.hooked else None
            except UnknownScanError as error:
                raise InexactError(f"{type(model).__name__} cannot decode with our KV cache ({error}); {INSTEAD}") from error
            except UserError:
                raise
            except Exception as error:  # a model may raise anything when it does not support this cache or mask
                raise InexactError(
                    f"{type(model).__name__} cannot decode with our KV cache ({lacking(model, error)}); {INSTEAD}"
                ) from error

    def _record_scans(self) -> dict[int, Limits]:
        """Limits of the step sizes of recurrent layers, whose scans are recorded from here on."""
        return record_scans(self.model) if self.recurrent else {}

    def _prepare(self) -> None:
        """Set up another runner of the same modules before its first forward."""

    def _install_attention(self) -> bool:
        """Returns whether whole sequences run without a mask."""
        return install(self)

    @property
    def text_model(self) -> Any:
        """The same weights in the class that is loaded where only text is read. Its parameter names hold for every load."""
        return self.model

    @property
    def captured(self) -> bool:
        return self.capture_reason is None

    @property
    def capture_reason(self) -> str | None:
        """Why no CUDA graph can hold its decode steps; None: one can, or there is no GPU. Tried once on each device."""
        device = self.device
        if device.type != "cuda":
            return None
        if device not in self._capture_reasons:
            self._capture_reasons[device] = self._why_not_captured()
        return self._capture_reasons[device]

    def _why_not_captured(self) -> str | None:
        return why_not_captured(self)

    @property
    def takes_positions(self) -> bool:
        """Whether its forward has `position_ids`."""
        return "position_ids" in self._accepts

    @property
    def longest_reach(self) -> int:
        """Positions of its longest window or chunk; 0: every layer sees everything."""
        return self.masks.longest

    def _fingerprint(self) -> str:
        return fingerprint_of(self.text_model)

    def reference(self, draw: int = 0) -> Reference | None:
        """Logits of the model's own forward for the probe's sequences."""
        return reference_of(self.model, self.longest_reach, draw)

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
        weight_VH: Tensor = self.model.get_output_embeddings().weight
        return weight_VH if self._scale == 1.0 else weight_VH * self._scale

    def _hook(self, number: int) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            if number in self._wanted:
                self._captured[number] = output[0] if isinstance(output, tuple) else output

        return keep

    def embed(self, token: Tensor) -> Tensor:
        return self.model.get_input_embeddings()(token)

    def head(self, hidden_H: Tensor) -> Tensor:
        return self._scaled(self.model.get_output_embeddings()(hidden_H))

    def _scaled(self, logits_V: Tensor) -> Tensor:
        """What the model does to its head's output: a factor, or a soft cap."""
        if self._scale != 1.0:
            logits_V = logits_V * self._scale
        return logits_V if self._softcap is None else torch.tanh(logits_V / self._softcap) * self._softcap

    def forward(
        self,
        token_BN: Tensor,
        kv: KVCache | None,
        ancestor_BNN: Tensor | Documents | None,
        position_BN: Tensor,
        taps: Taps,
        logit_row_BR: Tensor | None = None,
    ) -> TargetOut:
        self._check_taps(taps)
        inputs = self._inputs(token_BN, kv, ancestor_BNN, position_BN)
        self._captured, self._wanted = {}, frozenset(taps.blocks)
        with recording(None if kv is None else inputs[self._cache_argument].recorder):
            final_BNH = self.backbone.module(**inputs).last_hidden_state
        if kv is not None and kv.states is not None and not self._states:
            self._states = kv.states.like()
        hidden, self._captured, self._wanted = self._captured, {}, frozenset()
        self._complete(hidden, inputs)
        return self._output(final_BNH, hidden, taps, logit_row_BR)

    def _complete(self, hidden: dict[int, Tensor], inputs: dict[str, Any]) -> None:
        """Add to the taps what the model adds to its blocks' outputs between the blocks: nothing."""

    def _check_taps(self, taps: Taps) -> None:
        """Raise UserError for blocks whose outputs are not the model's hidden states."""
        if taps.blocks and self.wrong_tap is not None:
            raise UserError(
                f"the output of block {self.wrong_tap} of {type(self.model).__name__} is no hidden state of it (taps); "
                "choose a drafter that reads the target's last state alone"
            )

    def _inputs(
        self, token_BN: Tensor, kv: KVCache | None, ancestor_BNN: Tensor | Documents | None, position_BN: Tensor
    ) -> dict[str, Any]:
        """The arguments of the model's own forward."""
        inputs: dict[str, Any] = {"input_ids": token_BN}
        if self.takes_positions:
            inputs["position_ids"] = position_BN
        inputs["use_cache"] = kv is not None
        if kv is not None:
            recorder = Recorder(kv.states, self._step_limits) if kv.states is not None else None
            inputs[self._cache_argument] = SlotCache(kv, self.shape.blocks, self._row_shapes, recorder)
        if kv is None and self.unmasked and not isinstance(ancestor_BNN, Tensor):
            inputs |= {"whole": True, "documents": ancestor_BNN}
            inputs["attention_mask"] = self.masks.unused(token_BN)
        elif kv is not None or ancestor_BNN is not None:
            inputs["attention_mask"] = self.masks(kv, ancestor_BNN, position_BN, self.dtype)
        return inputs

    def generation_inputs(self, token_BT: Tensor) -> dict[str, Tensor]:
        """The arguments of transformers' `generate` for these prompts."""
        return {"input_ids": token_BT}

    def _output(self, final_BNH: Tensor, hidden: dict[int, Tensor], taps: Taps, logit_row_BR: Tensor | None) -> TargetOut:
        if taps.final:
            hidden[FINAL] = final_BNH
        if logit_row_BR is None:
            return TargetOut(self.head(final_BNH), hidden)
        if logit_row_BR.shape[1] == 0:
            return TargetOut(None, hidden)
        rows_BRH = final_BNH.gather(1, logit_row_BR[..., None].expand(-1, -1, final_BNH.shape[-1]))
        return TargetOut(self.head(rows_BRH), hidden)

    def new_cache(self, slots: int, max_len: int, pages: int | None = None) -> KVCache:
        if not self.frozen and not self.training and not self.joins:
            substitute(self.model, self.bits)
        kv = KVCache(self.shape.blocks + self._more_layers, slots, max_len, self.device, pages, self.recurrent)
        for shape in dict.fromkeys(self._row_shapes.values()):
            layers = [number for number, row_shape in self._row_shapes.items() if row_shape == shape]
            kv.allocate(shape.heads, shape.width, self.dtype, shape.value_width, layers)
        if kv.states is not None:
            for number, (convolution, scan) in self._states.items():
                kv.states.allocate(number, convolution, scan)
        return kv

    def cache_bytes(self) -> CacheBytes:
        kv = self.new_cache(1, 1)
        return CacheBytes(kv.bytes_per_position, kv.state_bytes)

    def norm(self, hidden_H: Tensor) -> Tensor:
        if self._norm is None:
            self._norm = FrozenRef(final_norm(self.model, self.shape.blocks))
        return self._norm.module(hidden_H)

    def check_no_adapters(self) -> None:
        """Raise UserError for a target whose layers change from request to request."""
        if self.has_adapters:
            raise UserError(
                "this drafter runs or trains the target's own layers, which target.adapters change; leave target.adapters out, "
                "or choose another family"
            )

    def shallow(self, blocks: int) -> HFTarget:
        self.check_no_adapters()
        check_first(self.model, self.shape.blocks, blocks)
        return self._view(first_blocks(self.model, self.shape.blocks, blocks))

    def _view(self, model: PreTrainedModel) -> HFTarget:
        return HFTarget(model, self.stop_ids)

    def with_added(self, added: Mapping[str, LowRank]) -> HFTarget:
        """A frozen target over the same weights, whose linear maps add to their outputs what `added` gives for their inputs.

        added: by the maps' names in the model. Raises UserError for a target whose maps cannot be added to.
        """
        self.check_no_adapters()
        view = self._view(weight_sharing_copy(self.model))
        for name, low_rank in added.items():
            view.model.get_submodule(name).register_forward_hook(Adding(low_rank))
        return view

    def refresh_added(self) -> None:
        """Make a target from `with_added` ready to decode with the current matrices."""

    def pruned(self, blocks: int) -> HFTarget:
        """A trainable copy of the first `blocks` blocks with embedding, norm and head."""
        if not 1 <= blocks <= self.shape.blocks:
            raise UserError(f"drafter.blocks is {blocks}; the target has {self.shape.blocks}, choose 1..{self.shape.blocks}")
        check_whole(self.model, "copies whole blocks of the target")
        whole_model = self.text_model
        config = copy.deepcopy(whole_model.config)
        set_depth(config, blocks)
        model: Any = type(whole_model)(config)
        missing = model.load_state_dict(narrowed(whole_model.state_dict(), model), strict=False).missing_keys
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
