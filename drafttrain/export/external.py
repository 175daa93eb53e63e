"""A drafter's directory that is not our checkpoint: its place, configuration and tensors.

Pickles are read as tensors only (`weights_only`), so that no code in them runs.

A field of the configuration that nothing asked for is known to change nothing, or it is refused. A field that is passed over in
silence is the worst kind of import: the drafter loads, and drafts something else.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Container, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, HTTPError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from drafttrain.core.errors import UserError, hub_reason, without_token
from drafttrain.core.files import check_listed
from drafttrain.export.compressed import Compression
from drafttrain.targets.weights import listed_files

SAFE = ("model.safetensors", "medusa_lm_head.safetensors", "hydra_lm_head.safetensors", "adapter_model.safetensors")
PICKLED = ("pytorch_model.bin", "medusa_lm_head.pt", "hydra_lm_head.pt", "adapter_model.bin")
RECORD = "drafttrain.json"  # in our own exports: options and decode settings that the layout cannot hold
CONFIGS = ("config.json", "adapter_config.json")
FETCHED = (".json", ".txt", ".model", ".jinja", ".safetensors")
MASK_EMBEDDING = "mask_embedding.pt"  # of some drafters, which vLLM embeds masks with
AGAIN = "fetch it again"
KINDS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}  # of weights
SHOWN = 4  # names of tensors in a message

ROTARY = ("rope_scaling", "rope_parameters")  # objects whose fields `layers.layer_options` checks by their kind
# Fields that change no draft, whatever their value is, by the reason.
GROUPS = {
    "names and versions": """
        architectures auto_map base_model_name_or_path name_or_path target_model_name_or_path target_model_type model_type
        draft_model_type speculators_config speculators_version transformers_version peft_version version dtype torch_dtype
        has_no_defaults_at_init task_specific_params finetuning_task problem_type id2label label2id
    """,
    "tokens that no drafter reads": """
        bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id image_token_id video_token_id
    """,
    "how it was trained": """
        initializer_range init_std attention_dropout hidden_dropout dropout_rate embd_pdrop resid_pdrop num_anchors ttt_length
        step_loss_decay loss_decay_gamma confidence_head_alpha ce_loss_alpha l1_loss_alpha lambda_base_start aux_loss_alpha
        lambda_base_decay_steps num_depths down_sample_ratio down_sample_ratio_min parallel_drafting
        output_router_logits router_aux_loss_coef router_jitter_noise seq_aux pretraining_tp use_cache attention_mode
        attn_implementation draft_num_hidden_layers embed_requires_grad gradient_checkpointing
    """,
    "how it is served": """
        n_candidates top_k_tokens_per_head spd_type xpress_topc xpress_num_passes num_jacobi_passes beam_width max_seq_len
        max_paths topk num_lookahead_tokens
    """,
    "the tensors say it": """
        attention_bias mlp_bias qkv_bias use_bias tie_word_embeddings use_qk_norm qk_norm projector_type
        enable_confidence_head use_confidence_head confidence_head_with_markov markov_head_type qk_head_dim
    """,
    "copied from a target: windows that are off, experts, which drafters' layers do not have": """
        max_window_layers sliding_window use_sliding_window layer_types decoder_sparse_step mlp_only_layers
        moe_intermediate_size shared_expert_intermediate_size num_experts num_local_experts num_experts_per_tok
        n_routed_experts n_shared_experts moe_layer_freq first_k_dense_replace norm_topk_prob routed_scaling_factor
        scoring_func topk_method topk_group n_group num_nextn_predict_layers ep_size
    """,
    "copied from a target: engines and trainers rotate latent attention whatever it says": "mla_use_nope",
    "settings of transformers' generate()": """
        max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
        typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
        num_return_sequences output_scores output_attentions output_hidden_states return_dict return_dict_in_generate
        forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
        begin_suppress_tokens torchscript use_bfloat16 tf_legacy_loss pruned_heads is_decoder is_encoder_decoder
        tie_encoder_decoder cross_attention_hidden_size add_cross_attention chunk_size_feed_forward prefix
    """,
    "of a peft adapter: how it was trained, and what its tensors say": """
        auto_mapping inference_mode lora_dropout revision runtime_config task_type loftq_config target_modules exclude_modules
        layers_pattern megatron_config megatron_core
    """,
}
HARMLESS = {name for group in GROUPS.values() for name in group.split()}

Found = TypeVar("Found")


class Fields(dict[str, Any]):
    """An object of a configuration, which knows the keys that were asked for: others would be lost without a word."""

    def __init__(self, given: Mapping[str, Any], asked: set[str] | None = None) -> None:
        super().__init__({key: Fields(x) if type(x) is dict else x for key, x in given.items()})
        self.asked: set[str] = set() if asked is None else asked

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def having(self, more: Mapping[str, Any]) -> Fields:
        """The same object with other values of some keys. What is asked of it is asked of this one."""
        return Fields({**self, **more}, self.asked)


class ExternalCheckpoint:
    """A directory of another project's drafter. origin: the name that the user gave. record: in place of the one in it.

    `config` holds config.json, or a peft adapter's adapter_config.json. Raises UserError for a directory without configuration
    or weights, for unreadable files, and for an export of ours whose files were changed.
    """

    def __init__(self, directory: Path, origin: str | None = None, record: dict[str, Any] | None = None) -> None:
        self.directory, self.origin = directory, origin or str(directory)
        if record is not None:
            self.record = record
        self.config_file = next((directory / name for name in CONFIGS if (directory / name).is_file()), None)
        if self.config_file is None:
            raise UserError(
                f"{self.origin}: expected a checkpoint of a drafter, got no drafter.json, {' or '.join(CONFIGS)} there; "
                "name a step-NNNNN directory of a run, or a published drafter"
            )
        check_listed(directory, "export it again, or fetch it again", lambda name: Path(name).suffix in FETCHED)
        self.config = Fields(_json(self.config_file))
        self.compression = Compression.in_config(self.config, self.origin)
        self.weights, self.files = self._find()

    def _find(self) -> tuple[str, list[Path]]:
        """(the name of its weights, their files): safetensors before pickles."""
        for names in (SAFE, PICKLED):
            weight_names = [name for name in names if self._parts(name)]
            if len(weight_names) > 1:
                raise UserError(
                    f"{self.origin}: holds {' and '.join(weight_names)}; keep the drafter's own weights in a directory"
                )
            if weight_names:
                return weight_names[0], self._parts(weight_names[0])
        file_names = sorted(
            path.name for path in self.directory.iterdir() if path.suffix in (".safetensors", ".bin", ".pt", ".gguf")
        )
        actual = f"got {', '.join(file_names)}" if file_names else "got none"
        raise UserError(
            f"{self.origin}: expected weights in one of {', '.join(SAFE + PICKLED)}, {actual}; rename the file, or {AGAIN}"
        )

    def _parts(self, name: str) -> list[Path]:
        index = self.directory / f"{name}.index.json"
        if not index.is_file():
            return [self.directory / name] if (self.directory / name).is_file() else []
        return listed_files(index, self.origin)

    @cached_property
    def record(self) -> dict[str, Any]:
        """What our own export wrote into the directory; empty where there is nothing of it."""
        try:
            record = json.loads((self.directory / RECORD).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return record if isinstance(record, dict) else {}

    def exported(self, option: str) -> Any:
        """An option in the record of our own export; None where there is none."""
        options = self.record.get("options")
        return options.get(option) if isinstance(options, dict) else None

    @property
    def adapter(self) -> bool:
        """Whether it is a peft adapter."""
        return self.config_name == CONFIGS[1]

    @property
    def pickled(self) -> bool:
        """Whether the weights are a pickle."""
        return self.weights in PICKLED

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors on the CPU, as they were saved, quantised weights in float32. Raises UserError for values that cannot be
        weights.
        """
        tensors: dict[str, Tensor] = {}
        for file in self.files:
            shard = _readable(file, lambda: (_unpickled if self.pickled else load_file)(file))  # noqa: B023
            if self.compression is None:
                _check_weights(file, shard)
            tensors |= shard
        if self.compression is not None:  # the parts of a weight may be in several files
            tensors = self.compression.widened(tensors, self.origin)
            _check_weights(self.directory / self.weights, tensors)
        return tensors

    @cached_property
    def kinds(self) -> dict[str, str]:
        """Each tensor's dtype, in safetensors' words; of quantised weights F32. Of safetensors files only headers are read."""
        if self.pickled:
            return {name: KINDS.get(tensor.dtype, str(tensor.dtype)) for name, tensor in self.tensors.items()}
        kinds = {name: dtype_name for file in self.files for name, dtype_name in _readable(file, lambda: _kinds(file)).items()}  # noqa: B023
        return kinds if self.compression is None else self.compression.names(kinds)

    def dtype(self, without: Container[str] = ()) -> str:
        """The narrowest dtype that holds all weights but the named ones: float32, bfloat16 or float16."""
        torch_names = {dtype_name: str(dtype).removeprefix("torch.") for dtype, dtype_name in KINDS.items()}
        dtypes = {
            torch_names[dtype_name]
            for name, dtype_name in self.kinds.items()
            if dtype_name in torch_names and name not in without
        }
        return dtypes.pop() if len(dtypes) == 1 else "float32"

    def has(self, *names: str) -> bool:
        """Whether there are tensors with these names."""
        return all(name in self.kinds for name in names)

    def summary(self) -> str:
        """A short summary for messages."""
        fields = {
            key: self.config[key] for key in ("architectures", "model_type", "speculators_model_type") if key in self.config
        }
        architecture = (
            ", ".join(f"{key} {value!r}" for key, value in fields.items()) or f"no architecture in {self.config_name}"
        )
        return f"{architecture}, and {len(self.kinds)} tensors in {self.weights} ({listed(list(self.kinds))})"

    @property
    def config_name(self) -> str:
        """The name of the configuration file."""
        assert self.config_file is not None
        return self.config_file.name

    def field(self, key: str, *inside: str) -> Any:
        """A value of the configuration, or of an object inside it. Raises UserError where it is missing."""
        section: Any = self.config
        for name in inside:
            section = section.get(name) if isinstance(section, Mapping) else None
        if not isinstance(section, Mapping) or section.get(key) is None:
            location = "'s ".join([self.config_name, *inside])
            raise UserError(f"{self.origin}: {location} does not say {key}, which the drafter cannot be built without; add it")
        return section[key]

    def number(self, key: str, *inside: str, least: int = 1) -> int:
        """A field that is a whole number from `least` on. Raises UserError, as `field` does, and for other values."""
        value = self.field(key, *inside)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UserError(f"{self.origin}: {key} is {value!r} in {self.config_name}; a number from {least} is needed")
        return value

    def object(self, key: str) -> Mapping[str, Any]:
        """A field that is an object. Raises UserError, as `field` does, and for other values."""
        value = self.field(key)
        if not isinstance(value, Mapping):
            raise UserError(f"{self.origin}: {key} is {value!r} in {self.config_name}; an object is needed")
        return value

    @property
    def architectures(self) -> list[str]:
        """The classes that the configuration names. Raises UserError where they are no list of names."""
        names = self.config.get("architectures") or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise UserError(f"{self.origin}: architectures is {names!r} in {self.config_name}; a list of names is needed")
        return names

    def flag(self, key: str, value: Any) -> bool:
        """A field's value, if it is true or false. Raises UserError for others: a text such as "false" would count as true."""
        if not isinstance(value, bool):
            raise UserError(f"{self.origin}: {key} is {value!r} in {self.config_name}; true or false is needed")
        return value

    def wants(self, key: str, value: Any, allowed: tuple[Any, ...], why: str) -> None:
        """Raise UserError unless our drafter supports this value. why: continues the message after the value."""
        if value not in allowed:
            choices = " or ".join(repr(x) for x in allowed if x is not None)
            raise UserError(f"{self.origin}: {key} is {value!r}, {why}; only {choices} can be imported")


def fetched(name: str) -> Path:
    """The local directory of a hub id, `owner/name` or `owner/name@revision`. Pickles are fetched only without safetensors.

    Raises UserError where it cannot be fetched.
    """
    repository, _, revision = name.partition("@")
    query: dict[str, Any] = {"repo_id": repository, "revision": revision or None}
    try:
        patterns = [*(f"*{suffix}" for suffix in FETCHED), MASK_EMBEDDING]
        directory = Path(snapshot_download(**query, allow_patterns=patterns))
        if not any(directory.glob("*.safetensors")):
            pickles = [f"{Path(file).stem}*{Path(file).suffix}" for file in PICKLED]
            directory = Path(snapshot_download(**query, allow_patterns=[*(f"*{suffix}" for suffix in FETCHED[:-1]), *pickles]))
    except (HTTPError, HFValidationError, OSError, ValueError) as error:
        if (hub_error := hub_reason(error, repository, revision=revision or None)) is not None:
            raise UserError(f"checkpoint {name!r} is no directory here, and {hub_error}") from error
        reason = without_token(" ".join(str(error).split()))[:160]
        raise UserError(
            f"checkpoint {name!r} is no directory here, and could not be fetched as a hub id ({reason}); "
            "name a directory, or a hub id that can be reached"
        ) from error
    return directory


def check_unread(found: ExternalCheckpoint, family: str, usual: Mapping[str, Any]) -> None:
    """Raise UserError for a field that nothing asked for and that may change drafts. usual: values that change nothing."""
    unread = sorted(f"{path} {value!r}"[:80] for path, value in _unread(found.config, usual))
    if unread:
        raise UserError(
            f"{found.origin}: {found.config_name} says {', '.join(unread[:4])}, which drafters of {family} do not know here; "
            "if the drafter does not need it, remove it there"
        )


def _unread(fields: Fields, defaults: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in fields.items():
        if value is None or value in ({}, []) or key.startswith("_") or key in ROTARY or key in HARMLESS:
            continue
        if key not in fields.asked:
            if key not in defaults or defaults[key] != value:
                yield f"{prefix}{key}", value
        elif isinstance(value, Fields):
            yield from _unread(value, defaults, f"{prefix}{key}.")


def listed(names: list[str]) -> str:
    """The first names, in order, and the number of the others."""
    suffix = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(sorted(names)[:SHOWN]) + suffix


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: damaged or cut off ({error}); {AGAIN}") from error
    if not isinstance(content, dict):
        raise UserError(f"{file}: expected an object, got {type(content).__name__}; {AGAIN}")
    return content


def _readable(file: Path, load: Callable[[], dict[str, Found]]) -> dict[str, Found]:
    try:
        return load()
    except (SafetensorError, pickle.UnpicklingError, OSError, EOFError, RuntimeError, ValueError, KeyError) as error:
        raise UserError(f"{file}: damaged, cut off, or no tensors ({' '.join(str(error).split())[:120]}); {AGAIN}") from error


def _kinds(file: Path) -> dict[str, str]:
    with safe_open(file, "pt") as reader:
        return {name: str(reader.get_slice(name).get_dtype()) for name in reader.keys()}  # noqa: SIM118


def _check_weights(file: Path, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.dtype not in KINDS:
            raise UserError(f"{file}: {name} is {tensor.dtype}; weights must be float32, bfloat16 or float16")
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise UserError(f"{file}: {name} holds NaN or infinity; these weights cannot draft, {AGAIN}")


def _unpickled(file: Path) -> dict[str, Tensor]:
    content = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(content, dict) or not all(isinstance(x, Tensor) for x in content.values()):
        raise ValueError(f"a {type(content).__name__} instead of named tensors")
    return {str(name): tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in content.items()}
