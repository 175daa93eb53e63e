"""Loads the target that the options name. Errors explain in one line why it cannot be loaded."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from drafttrain.core.errors import UserError, hub_reason, without_token
from drafttrain.model.kv_cache import KVCache
from drafttrain.model.masks import Documents
from drafttrain.model.shapes import TargetShape
from drafttrain.model.target import FINAL, Taps, TargetOut
from drafttrain.targets import TargetOptions, check_there, unknown_adapter
from drafttrain.targets.adapters import check_adapters, with_adapter
from drafttrain.targets.devices import bind, device_of
from drafttrain.targets.experts import ExpertTarget, load_share, whole_size
from drafttrain.targets.fast import FastTarget, runs, why_not, why_whole
from drafttrain.targets.hf import HFTarget
from drafttrain.targets.images import TEXT_ONLY, ImageReader, Images, NoImages, image_reader
from drafttrain.targets.parallel import WHOLE, Part
from drafttrain.targets.probe import InexactError
from drafttrain.targets.quantised import FP8, Fp8Checkpoint, quantise
from drafttrain.targets.split import ShardedTarget, Shards, SplitTarget, check_divides, split_target
from drafttrain.targets.structure import shape_of
from drafttrain.targets.vision import ARCHITECTURES, VisionTarget
from drafttrain.targets.weights import INDEX, PICKLED, PICKLED_INDEX, check_settings, is_pickled, load_model

ANEW = "each step computes the text anew"


class RecomputedTarget(HFTarget):
    """As HFTarget, by the model's own forward without a cache, one row at a time. Raises UserError where that is not exact."""

    name = "recomputed"

    def __init__(self, model: PreTrainedModel, stop_ids: frozenset[int] = frozenset(), why: str = "") -> None:
        """why: it cannot decode otherwise."""
        self.why = why
        super().__init__(model, stop_ids)
        self.trees, self.chains_reason = (
            False,
            f"{ANEW}, because {why}; its times are not those of a decoder with a cache",
        )

    def _prepare(self) -> None:
        self.recurrent = True  # it may have such layers, whose rows hold one text each

    def _record_scans(self) -> dict[int, tuple[float, float]]:
        return {}

    def _install_attention(self) -> bool:
        return False

    def _why_not_captured(self) -> str:
        return ANEW

    def new_cache(self, slots: int, max_len: int, pages: int | None = None) -> KVCache:
        kv = KVCache(1, slots, max_len, self.device, pages)
        kv.allocate(1, 1, torch.float32, 0)  # every token id has a float32 of its own
        return kv

    def forward(
        self,
        token_BN: Tensor,
        kv: KVCache | None,
        ancestor_BNN: Tensor | Documents | None,
        position_BN: Tensor,
        taps: Taps,
        logit_row_BR: Tensor | None = None,
    ) -> TargetOut:
        if kv is None:
            return super().forward(token_BN, None, ancestor_BNN, position_BN, taps, logit_row_BR)
        N, keys_B1N1 = token_BN.shape[1], token_BN[:, None, :, None].float()
        kv.append(0, keys_B1N1, keys_B1N1[..., :0])
        states_by_block: dict[int, list[Tensor]] = {}
        for row in range(len(token_BN)):
            token_1P = kv.read_row(0, row, N)[0][..., 0].long()
            position_1P = torch.arange(token_1P.shape[1], device=self.device)[None]
            out = super().forward(token_1P, None, None, position_1P, Taps(taps.blocks, final=True), token_1P[:, :0])
            for number, states_1PH in out.hidden.items():
                states_by_block.setdefault(number, []).append(states_1PH[:, -N:])
        hidden = {number: torch.cat(rows) for number, rows in states_by_block.items()}
        return self._output(hidden.pop(FINAL), hidden, taps, logit_row_BR)

    def _view(self, model: PreTrainedModel) -> HFTarget:
        return RecomputedTarget(model, self.stop_ids, self.why)


EMBEDDED = Path(__file__).parents[1] / "assets" / "tiny"
ADAPTER, MODEL = "adapter_config.json", ("model.safetensors", INDEX, PICKLED, PICKLED_INDEX)  # files
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
AUTO = "auto"


def dtype_of(options: TargetOptions) -> str:
    """The name of the target's format: of `auto`, bfloat16 on a GPU and float32 on a CPU."""
    if options.dtype != AUTO:
        return options.dtype
    return "bfloat16" if device_of(options.device).type == "cuda" else "float32"


@dataclass(frozen=True, slots=True)
class LoadedTarget:
    """A frozen target with its tokenizer."""

    target: HFTarget
    tokenizer: PreTrainedTokenizerBase
    path: str  # directory or hub id
    description: dict[str, Any]  # the facts that checkpoints and reports record
    images: Images = TEXT_ONLY  # turns images of conversations into tokens
    adapters: Mapping[str, HFTarget] = field(default_factory=dict)  # the target with each of its LoRA adapters, by name

    def of(self, adapter: str | None) -> LoadedTarget:
        """The same with the target of this adapter; None: the base."""
        return self if adapter is None else replace(self, target=self.adapters[adapter])

    def check_adapters(self, wanted: Iterable[str | None]) -> None:
        """Raise UserError for an adapter that the target does not have."""
        if unknown := sorted({name for name in wanted if name is not None} - self.adapters.keys()):
            raise UserError(unknown_adapter(unknown[0], self.adapters))


def load_target(
    options: TargetOptions,
    part: Part = WHOLE,
    shards: Shards | None = None,
    kind: type[SplitTarget | ExpertTarget] | None = None,
) -> LoadedTarget:
    """Load the target with its tokenizer.

    part: this process's part, when several processes share the target as a target of this kind; None: as `options` say, in lock
    step. shards: spreads the blocks over processes instead. Raises UserError for an unknown kind, a missing path, a directory
    without a usable model, and a model that cannot be split in this way.
    """
    path, device = path_of(options), device_of(options.device)
    check_options(options, shared=part.size > 1 or shards is not None)
    kind = kind or (ExpertTarget if options.expert_parallel > 1 else SplitTarget)
    by_experts = part.size > 1 and issubclass(kind, ExpertTarget)
    if by_experts and options.runner == "fast":
        raise UserError("target.runner=fast needs whole blocks, but processes share their experts; set target.runner=hf")
    bind(device)
    check_settings(path)
    model: Any
    model, tokenizer = _read(options, path, part, shards, by_experts)
    parameters = (
        whole_size(model, part.size) if by_experts else sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    )
    fingerprint = None if options.weights is None else quantise(model, options.weights, device)
    runner = HFTarget if by_experts else runner_of(options.runner, model, part)
    stop_ids = stop_ids_of(model, tokenizer)
    if device.type == "cpu":
        keep_freed_memory()
    images = load_images(options, model.config, tokenizer)
    target: HFTarget
    failed = None
    if shards is not None:
        target = ShardedTarget(model, shards, stop_ids)
    elif part.size > 1 and issubclass(kind, ExpertTarget):
        target = kind(model.to(device), part, stop_ids)
    elif part.size > 1 and issubclass(kind, SplitTarget):
        target = split_target(model, part, device, stop_ids, kind)
    elif options.weights is None and type(model).__name__ in ARCHITECTURES:
        target = _with_tower(model.to(device), stop_ids, images, options)
    elif options.runner != "fast":
        try:
            target, failed = compared(runner, model.to(device), stop_ids)
        except InexactError as error:
            if options.weights is not None:
                raise
            del model  # the refused target has changed it
            fresh_model, _ = _read(options, path, part, shards, by_experts)
            target = RecomputedTarget(fresh_model.to(device), stop_ids, str(error).partition(";")[0])  # type: ignore[arg-type]
    else:
        target = runner(model.to(device), stop_ids)
    target.fingerprint = fingerprint or target.fingerprint
    if not isinstance(target, VisionTarget) and isinstance(images, ImageReader):
        images = NoImages("target.weights, and targets that processes share, run on text alone")
    check_pair(path, tokenizer, target.shape.vocab_size)
    target.tokenizer = tokenizer
    adapters = {name: with_adapter(target, name, folder) for name, folder in options.adapters.items()}
    target.has_adapters = bool(adapters)
    description = _description(options, target, parameters, failed)
    if adapters:
        description["adapters"] = {name: adapted.fingerprint for name, adapted in adapters.items()}
    return LoadedTarget(target, tokenizer, path, description, images, adapters)


def _read(
    options: TargetOptions, path: str, part: Part, shards: Shards | None, by_experts: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Read the model, or this process's share of its experts with all the rest, and the tokenizer."""
    shared = {"revision": options.revision, "trust_remote_code": options.trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(path, **shared)
        if part.size > 1 and not by_experts:
            check_divides(shape_of(config.get_text_config()), part.size)
        tokenizer = tokenizer_of(path, options)
        load_fn: Any = partial(load_share, part=part) if by_experts else None
        if part.size == 1 and shards is None and runs(config):
            fp8 = Fp8Checkpoint.of(config, path, options.revision, options.trust_remote_code)
            load_fn = load_fn if fp8 is None else fp8.load
        if part.size == 1 and shards is None and options.weights is None and _architecture(config) in ARCHITECTURES:
            load_fn = AutoModelForImageTextToText.from_pretrained
        settings: dict[str, Any] = {
            "read": load_fn,
            "dtype": DTYPES[dtype_of(options)],
            "attn_implementation": None if options.attention == "auto" else options.attention,
        }
        with nullcontext() if shards is None else shards.loading():
            return load_model(path, f"target.path {path!r}", **settings | shared), tokenizer
    except (UserError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # libraries raise errors of every kind for damaged files
        if "attention implementation" in str(error):
            raise UserError(
                f"target.attention={options.attention}: transformers does not support it for the architecture of {path!r}; "
                "set target.attention=eager, or leave it out"
            ) from error
        raise UserError(
            f"target.path {path!r} could not be loaded as a transformers causal LM: {reason(error, path, options.revision)}"
        ) from error


def compared(runner: type[HFTarget], model: PreTrainedModel, stop_ids: frozenset[int]) -> tuple[HFTarget, str | None]:
    """(target, why it is not on the fast runner). Transformers' forward takes its place if the probe finds it inexact."""
    if runner is HFTarget:
        return runner(model, stop_ids), None
    try:
        target = runner(model, stop_ids)
        if target.trees:
            return target, None
        failed = target.chains_reason
    except UserError as error:
        failed = str(error).partition(";")[0]
    return HFTarget(model, stop_ids), f"its probe failed, {failed}"


def _with_tower(model: PreTrainedModel, stop_ids: frozenset[int], images: Images, options: TargetOptions) -> VisionTarget:
    """A target of text and images; of text alone where it has no image processor."""
    reader = images if isinstance(images, ImageReader) else None
    return VisionTarget(model, stop_ids, reader=reader, drafter_inputs=options.image_inputs)


def load_images(options: TargetOptions, config: Any, tokenizer: PreTrainedTokenizerBase) -> Images:
    """The images of the target with this configuration, or the reason why it has none."""
    if (name := _architecture(config)) not in ARCHITECTURES:
        return NoImages(f"{name} is run on text alone; images work with {', '.join(ARCHITECTURES)}")
    shared = {"revision": options.revision, "trust_remote_code": options.trust_remote_code}
    return image_reader(path_of(options), config, tokenizer, **shared)


def _architecture(config: Any) -> str:
    """The name of the class that the checkpoint was saved from."""
    return str((getattr(config, "architectures", None) or [type(config).__name__])[0])


def load_shape(options: TargetOptions) -> TargetShape:
    """The target's dimensions, from its configuration only. Raises UserError as `load_target` does."""
    return shape_of(load_config(options).get_text_config())


def load_config(options: TargetOptions) -> Any:
    """transformers' configuration of the target. Raises UserError as `load_target` does."""
    path = path_of(options)
    try:
        return AutoConfig.from_pretrained(path, revision=options.revision, trust_remote_code=options.trust_remote_code)
    except Exception as error:  # as in `load_target`
        raise UserError(
            f"target.path {path!r} has no configuration that transformers can load: {reason(error, path, options.revision)}"
        ) from error


def load_tokenizer(options: TargetOptions) -> PreTrainedTokenizerBase:
    """The target's tokenizer only. Raises UserError as `load_target` does."""
    path = path_of(options)
    check_settings(path)
    try:
        return tokenizer_of(path, options)
    except UserError:
        raise
    except Exception as error:  # as in `load_target`; tokenizers raises plain Exceptions
        raise UserError(
            f"target.path {path!r} has no tokenizer that transformers can load: {reason(error, path, options.revision)}"
        ) from error


def tokenizer_of(path: str, options: TargetOptions) -> PreTrainedTokenizerBase:
    """The tokenizer of this path. Raises UserError for a length that is no number, which fails only when a text is read."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        path, revision=options.revision, trust_remote_code=options.trust_remote_code
    )
    if not isinstance(tokenizer.model_max_length, int | float):
        raise UserError(
            f"tokenizer_config.json of {path!r}: expected a number in model_max_length, got "
            f"{tokenizer.model_max_length!r:.60}; correct it, or remove the key"
        )
    return tokenizer


def reason(error: Exception, path: str, revision: str | None = None) -> str:
    """A library's error as part of one line, with its type where the text alone may be unclear.

    path, revision: of what was read. Failures of the hub are explained.
    """
    if not Path(path).exists() and (hub_failure := hub_reason(error, path, revision=revision)) is not None:
        return hub_failure
    text = without_token(" ".join(str(error).split()))[:200]
    return text if isinstance(error, OSError | ValueError | ImportError) else f"{type(error).__name__}: {text}"


def check_options(options: TargetOptions, shared: bool = False) -> None:
    """Raise UserError for incompatible values. shared: several processes share the target."""
    if options.tensor_parallel != 1 and options.expert_parallel != 1:
        raise UserError(
            f"target.tensor_parallel is {options.tensor_parallel} and target.expert_parallel {options.expert_parallel}, but a "
            "target is shared in one way; leave one out"
        )
    check_adapters(options.adapters)
    if options.adapters and (shared or options.weights is not None):
        conflict = "processes that share one" if shared else f"target.weights={options.weights}"
        raise UserError(f"target.adapters needs a whole target that is not quantised, not {conflict}; leave one out")
    if options.weights is None:
        return
    if shared:
        raise UserError(f"target.weights={options.weights} needs the whole target in every process; set target.weights=null")
    if options.runner == "fast" and options.weights != FP8:
        raise UserError(f"target.runner=fast reads whole weights, target.weights is {options.weights}; set target.runner=hf")


def _description(options: TargetOptions, target: HFTarget, parameters: int, failed: str | None) -> dict[str, Any]:
    """failed: why the probe refused the fast runner; None: it did not."""
    option_names = ("name", "path", "revision", "dtype", "weights", "tensor_parallel", "expert_parallel")
    description = {name: getattr(options, name) for name in option_names} | {"dtype": dtype_of(options)}
    description |= {
        "runner": target.name,
        "runner_reason": failed or _why_slow(options, target),
        "chains_reason": target.chains_reason,
        "attention_reason": _why_eager(options, target),
        "capture_reason": target.capture_reason if target.device.type == "cuda" else None,
        "architecture": type(target.model).__name__,
        "parameters": parameters,
        "fingerprint": target.fingerprint,
    }
    cache = target.cache_bytes()
    description |= {"kv_bytes_per_position": cache.position, "state_bytes_per_request": cache.states}
    if isinstance(target, VisionTarget):
        description["image_inputs"] = target.drafter_inputs
    return description | asdict(target.shape)


def _why_slow(options: TargetOptions, target: HFTarget) -> str | None:
    """Why `auto` did not choose the fast runner; None if it did."""
    if options.runner != "auto" or target.name == "fast" or isinstance(target, RecomputedTarget):
        return None
    return why_not(target.model) or "its weights are spread over processes"


def _why_eager(options: TargetOptions, target: HFTarget) -> str | None:
    """Why `auto` did not choose sdpa; None if it did."""
    if options.attention != "auto" or target.model.config.get_text_config()._attn_implementation != "eager":
        return None
    return f"transformers has no sdpa for {type(target.model).__name__}"


def path_of(options: TargetOptions) -> str:
    """The directory or hub id that the options name. Raises UserError for a directory without a usable model."""
    if options.name == "embedded":
        return str(EMBEDDED)
    if not options.path:
        raise UserError("target=hf needs target.path; set it to a model directory or a hub id")
    check_there(options)
    path = Path(options.path).expanduser()
    if not path.exists():
        return options.path
    if (path / ADAPTER).is_file() and not any((path / name).is_file() for name in MODEL):
        raise UserError(
            f"target.path {options.path!r} is a peft adapter of {base_of(path)!r}, no whole model; name the base, or save the "
            "merged model (PeftModel.merge_and_unload(), save_pretrained()) and name its directory"
        )
    if not (path / "config.json").is_file():
        raise UserError(f"target.path {options.path!r} has no config.json; set it to a transformers model directory")
    if not any(path.glob("*.safetensors*")) and not is_pickled(path):  # an index counts
        raise UserError(
            f"target.path {options.path!r} has no *.safetensors weights, and no {PICKLED}; save the model with "
            "save_pretrained()"
        )
    return str(path)


def base_of(adapter: Path) -> str:
    """The model that a peft adapter is for. Raises UserError for a configuration that does not name it."""
    try:
        return str(json.loads((adapter / ADAPTER).read_text(encoding="utf-8"))["base_model_name_or_path"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{adapter / ADAPTER} names no base_model_name_or_path; name a model as target.path") from error


def runner_of(name: str, model: Any, part: Part) -> type[HFTarget]:
    """The runner's class. Raises UserError if `fast` or a split needs what the model does not support."""
    reason = why_not(model)
    if name == "fast" and reason:
        raise UserError(f"target.runner=fast cannot run this model: {reason}; set target.runner=hf")
    slow_reason = "target.runner is hf" if name == "hf" else reason
    if part.size > 1 and not slow_reason and (split_reason := why_whole(model)):
        raise UserError(f"target.tensor_parallel is {part.size}: {split_reason}; leave target.tensor_parallel out")
    if slow_reason and part.size > 1:
        raise UserError(
            f"target.tensor_parallel={part.size} needs the fast runner: {slow_reason}; leave target.tensor_parallel out"
        )
    return HFTarget if slow_reason else FastTarget


def keep_freed_memory() -> None:
    """Make glibc reuse freed tensors' pages instead of returning them: training steps on a CPU take about 10 % less time.

    Does nothing with another libc. The numbers are mallopt's M_MMAP_THRESHOLD, M_TRIM_THRESHOLD and M_TOP_PAD.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        for number, size in ((-3, 32 << 20), (-1, 2**31 - 1), (-2, 64 << 20)):
            mallopt(number, size)


def check_pair(path: str, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Raise UserError for a tokenizer of another model.

    A few tokens more than the model has are borne, as CodeLlama-34b's and Gemma-3-1B's: a text that needs one is refused then.
    """
    if len(tokenizer) > vocab_size + max(16, vocab_size // 1000):
        raise UserError(f"the tokenizer of {path!r} has {len(tokenizer)} tokens, the model {vocab_size}; give a matching pair")


def stop_ids_of(model: Any, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """End-of-sequence ids of the generation configuration, the model's configuration and the tokenizer, as far as the model
    has them. Raises UserError for what is no token id.
    """
    stop_ids: set[int] = set()
    for owner in (model.generation_config, model.config, model.config.get_text_config(), tokenizer):
        eos_ids = getattr(owner, "eos_token_id", None)  # a configuration of text and images may have none itself
        ids = eos_ids if isinstance(eos_ids, list | tuple) else [] if eos_ids is None else [eos_ids]
        if not all(type(i) is int for i in ids):
            raise UserError(
                f"eos_token_id in the target's {type(owner).__name__} is {eos_ids!r:.60}; give a token id or a list of them"
            )
        stop_ids |= set(ids)
    return frozenset(i for i in stop_ids if i < model.config.get_text_config().vocab_size)
