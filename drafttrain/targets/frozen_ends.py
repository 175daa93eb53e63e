"""A frozen target whose blocks are not in memory: its embedding, last norm and output matrix, loaded or given from outside.

They compute what those of the whole target compute, bit for bit. Only the states of one sequence are known, once it has been
computed block by block (`train/streamed_states.py`). Loading finds out on the first block how the whole would be run.

Shapes: B rows, N positions, T positions of the known sequence, L blocks, H hidden, R logit rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.initialization import no_init_weights

from drafttrain.core.errors import UserError
from drafttrain.model.joint import PACKED_BYTES
from drafttrain.model.low_rank import LowRank
from drafttrain.model.masks import Documents
from drafttrain.model.target import Taps, TargetOut
from drafttrain.targets import TargetOptions
from drafttrain.targets.devices import bind, device_of
from drafttrain.targets.fast import FastTarget
from drafttrain.targets.hf import HFTarget
from drafttrain.targets.images import NoImages
from drafttrain.targets.live import LiveTarget
from drafttrain.targets.load import (
    DTYPES,
    LoadedTarget,
    RecomputedTarget,
    check_options,
    check_pair,
    compared,
    dtype_of,
    keep_freed_memory,
    path_of,
    reason,
    runner_of,
    stop_ids_of,
    tokenizer_of,
)
from drafttrain.targets.parallel import WHOLE
from drafttrain.targets.pieces import Pieces
from drafttrain.targets.probe import InexactError
from drafttrain.targets.shallow import final_norm, first_blocks
from drafttrain.targets.structure import find_blocks, set_depth, shape_of, unsupported
from drafttrain.targets.vision import ARCHITECTURES
from drafttrain.targets.weights import StoredTensors, check_settings, model_class

NO_BLOCKS = "features.target=ends loads no blocks of the target"
Share = Callable[[Any], Any]  # rank 0's value, on every process


@dataclass(frozen=True, slots=True)
class KnownStates:
    """The target's states of one sequence, and what else is known once every block has run."""

    ids: list[int]
    hidden: Mapping[int, Tensor]  # [T, H] by block
    final_TH: Tensor  # post-norm
    fingerprint: str
    wrong_tap: int | None = None  # as `HFTarget.wrong_tap`


@dataclass(frozen=True, slots=True)
class ProbedEnds:
    """What running the first block with the ends has shown of the target."""

    fast: bool  # whether the fast runner would run it
    failed: str | None  # why its probe refused the fast runner
    chains_reason: str | None  # as `HFTarget.chains_reason`
    generations: bool


@dataclass(frozen=True, slots=True)
class WholeSize:
    """The size of the whole target."""

    parameters: int
    bytes: int


class FrozenEnds(HFTarget):
    """The ends of a target that transformers' own forward would run."""

    hooked = False
    capture_reason = NO_BLOCKS

    def __init__(self, model: PreTrainedModel, stop_ids: frozenset[int], probed: ProbedEnds, size: WholeSize) -> None:
        """model: with blocks on `meta`."""
        self.size = size
        super().__init__(model, stop_ids, frozen=False)
        model.requires_grad_(False).eval()
        self.frozen = True
        self.chains_reason, self.generations = probed.chains_reason, probed.generations
        self.trees = probed.chains_reason is None
        self.known: KnownStates | None = None

    def _install_attention(self) -> bool:
        return False

    @property
    def device(self) -> torch.device:
        device: torch.device = self._embedding.weight.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._embedding.weight.dtype
        return dtype

    @property
    def _embedding(self) -> Any:
        return self.model.get_input_embeddings()

    @property
    def own_bytes(self) -> int:
        """Bytes of its weights in memory."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters() if not p.is_meta)

    def learn(self, known: KnownStates) -> None:
        """Take up what was computed block by block."""
        self.known, self.fingerprint, self.wrong_tap = known, known.fingerprint, known.wrong_tap

    def drop_others(self) -> None:
        """Release the weights outside of the blocks that training does not use: encoders of images, embeddings of layers."""
        norm = final_norm(self.model, self.shape.blocks)
        ends: list[nn.Module] = [self._embedding, self.model.get_output_embeddings(), norm]
        end_param_ids = {id(p) for end_module in ends for p in end_module.parameters()}
        for module in self.model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if id(parameter) not in end_param_ids and not parameter.is_meta:
                    setattr(module, name, nn.Parameter(parameter.to("meta"), requires_grad=False))

    def forward(
        self,
        token_BN: Tensor,
        kv: Any,
        ancestor_BNN: Tensor | Documents | None,
        position_BN: Tensor,
        taps: Taps,
        logit_row_BR: Tensor | None = None,
    ) -> TargetOut:
        """The states of rows that begin as the known sequence does. Zeros follow where a row goes on otherwise: padding."""
        if kv is not None or ancestor_BNN is not None or self.known is None:
            self._refuse("runs the target")
        self._check_taps(taps)
        ids_N = torch.tensor(self.known.ids[: token_BN.shape[1]], device=self.device)
        same_BN = torch.zeros_like(token_BN, dtype=torch.bool)
        same_BN[:, : len(ids_N)] = (token_BN[:, : len(ids_N)] == ids_N).long().cumprod(1).bool()
        if not bool(same_BN[:, 0].all()):
            self._refuse("runs the target")
        hidden = {block: self._rows(self.known.hidden[block], same_BN) for block in taps.blocks}
        return self._output(self._rows(self.known.final_TH, same_BN), hidden, taps, logit_row_BR)

    def _rows(self, x_TH: Tensor, same_BN: Tensor) -> Tensor:
        """[B, N, H]: the sequence's states where a row is the same."""
        x_BNH = torch.zeros(*same_BN.shape, x_TH.shape[1], device=self.device, dtype=self.dtype)
        length = min(x_TH.shape[0], same_BN.shape[1])
        x_BNH[:, :length] = x_TH[:length].to(self.device)
        return x_BNH * same_BN[..., None]

    def new_cache(self, slots: int, max_len: int, pages: int | None = None) -> NoReturn:
        self._refuse("decodes with the target")

    def shallow(self, blocks: int) -> NoReturn:
        self._refuse("runs the target's first blocks")

    def pruned(self, blocks: int) -> NoReturn:
        self._refuse("copies blocks of the target")

    def with_added(self, added: Mapping[str, LowRank]) -> NoReturn:
        self._refuse("adds to the target's own linear maps")

    def _refuse(self, action: str) -> NoReturn:
        raise UserError(f"{NO_BLOCKS}, but this drafter or setting {action}; set features.target=whole, or another drafter")


class FastEnds(FrozenEnds, FastTarget):
    """The ends of a target that the fast runner would run: its norm, and its product with the output matrix."""

    def _prepare(self) -> None:
        self._prepare_ends()
        self._head.join(share=True, packed=self.size.bytes <= PACKED_BYTES)

    @property
    def captured(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class LoadedEnds:
    """The ends of a target, and the rest of its checkpoint, piece by piece."""

    loaded: LoadedTarget
    target: FrozenEnds
    pieces: Pieces


def load_ends(options: TargetOptions, first: bool = True, share: Share = lambda value: value) -> LoadedEnds:
    """Load them. All processes call it together; the first runs the first block once, and `share` gives its value to all.

    Raises UserError as `load_target` does, and for models that cannot be loaded in pieces.
    """
    path, device = path_of(options), device_of(options.device)
    check_options(options)
    bind(device)
    check_settings(path)
    pieces, model, tokenizer = _explained(options, lambda: _read(options, path))
    if device.type == "cpu":
        keep_freed_memory()
    stop_ids = stop_ids_of(model, tokenizer)
    probed: ProbedEnds | str | None = None
    if first:
        try:
            probed = _explained(options, lambda: _probed(options, model, pieces, stop_ids))
        except UserError as error:
            probed = str(error)
    probed = share(probed)
    if not isinstance(probed, ProbedEnds):
        raise UserError(str(probed))
    target = (FastEnds if probed.fast else FrozenEnds)(model, stop_ids, probed, WholeSize(pieces.parameters, pieces.bytes))
    check_pair(path, tokenizer, target.shape.vocab_size)
    target.tokenizer = tokenizer
    images = NoImages("features.target=ends reads text alone")
    return LoadedEnds(LoadedTarget(target, tokenizer, path, _description(options, target, probed), images), target, pieces)


def _read(options: TargetOptions, path: str) -> tuple[Pieces, Any, PreTrainedTokenizerBase]:
    pieces = Pieces(
        path,
        f"target.path {path!r}",
        options.revision,
        options.trust_remote_code,
        dtype=DTYPES[dtype_of(options)],
        attn_implementation=None if options.attention == "auto" else options.attention,
    )
    return pieces, pieces.outside(device_of(options.device)), tokenizer_of(path, options)


def _explained(options: TargetOptions, work: Callable[[], Any]) -> Any:
    try:
        return work()
    except (UserError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # libraries raise errors of every kind for damaged files, and models for missing blocks
        path = path_of(options)
        raise UserError(
            f"target.path {path!r} could not be loaded in pieces: {reason(error, path, options.revision)}; set "
            "features.target=whole"
        ) from error


@torch.no_grad()
def _probed(options: TargetOptions, model: Any, pieces: Pieces, stop_ids: frozenset[int]) -> ProbedEnds:
    """What the probe of a target of the first block shows. It decides which runner the whole target would have."""
    blocks = model.get_submodule(pieces.prefix)
    outline = blocks[0]

    def one_block() -> PreTrainedModel:
        blocks[0] = pieces.block(0).to(device_of(options.device))
        try:
            return first_blocks(model, pieces.count, 1)
        finally:
            blocks[0] = outline

    one_block_model = one_block()
    target: HFTarget
    failed = None
    try:
        if (cause := unsupported(pieces.config.get_text_config())) is not None:  # of other blocks than the first, maybe
            raise InexactError(f"{type(model).__name__} cannot decode with our KV cache ({cause})")
        target, failed = compared(runner_of(options.runner, one_block_model, WHOLE), one_block_model, stop_ids)
    except InexactError as error:  # its engine decodes; the refused target has changed the model
        target = RecomputedTarget(one_block(), stop_ids, str(error).partition(";")[0])
    return ProbedEnds(isinstance(target, FastTarget), failed, target.chains_reason, target.generations)


def _description(options: TargetOptions, target: FrozenEnds, probed: ProbedEnds) -> dict[str, Any]:
    """As of a whole target, without what running its blocks would show."""
    option_names = ("name", "path", "revision", "dtype", "weights", "tensor_parallel", "expert_parallel")
    description = {name: getattr(options, name) for name in option_names} | {"dtype": dtype_of(options)}
    description |= {
        "runner": target.name,
        "runner_reason": None,
        "chains_reason": probed.chains_reason,
        "attention_reason": None,
        "capture_reason": None,
        "architecture": type(target.model).__name__,
        "parameters": target.size.parameters,
        "fingerprint": target.fingerprint,
    }
    if type(target.model).__name__ in ARCHITECTURES:
        description["image_inputs"] = options.image_inputs
    return description | asdict(target.shape)


SHAPES_ALONE = "the target was given as shapes alone, so its blocks cannot be run"


class EndsTarget(LiveTarget):
    """The embedding, last norm and head of a target whose blocks run elsewhere.

    Their weights are NaN until they are given from outside.
    """

    name = "ends"

    def __init__(self, config: Any, options: TargetOptions, tokenizer: Any = None) -> None:
        one_block_config = set_depth_of_copy(config)
        device = device_of(options.device)
        settings = {"dtype": DTYPES[dtype_of(options)], "trust_remote_code": options.trust_remote_code}
        with torch.device(device), no_init_weights():
            model: Any = model_class(one_block_config).from_config(one_block_config, **settings)
        super().__init__(model, tokenizer=tokenizer)
        end_modules: list[nn.Module] = [model.get_input_embeddings(), model.get_output_embeddings(), self.norm_module]
        find_blocks(model, 1).to("meta")
        self.shape, self.trees = shape_of(config.get_text_config()), True
        model.config = config
        end_param_ids = {id(p) for module in end_modules for p in module.parameters()}
        self.weights = {name: p for name, p in model.named_parameters(remove_duplicate=False) if id(p) in end_param_ids}
        self.given = False  # whether the weights are there
        for parameter in self.weights.values():
            parameter.data.fill_(torch.nan)

    @property
    def fingerprint(self) -> str:
        """Unknown: the blocks are elsewhere."""
        return ""

    def set(self, weights: Mapping[str, Tensor]) -> None:
        """Copy the weights of embedding, norm and head; others may be among them. Raises UserError where one is missing."""
        missing_names = [name for name in self.weights if not self._source(name, weights)]
        if missing_names:
            raise UserError(
                f"set_ends needs the weights {', '.join(sorted(missing_names))}; name them as the model's state_dict() does"
            )
        for name, parameter in self.weights.items():
            weight = weights[self._source(name, weights)]
            if weight.shape != parameter.shape:
                raise UserError(f"set_ends: {name} is {list(weight.shape)}, the target's is {list(parameter.shape)}")
            parameter.data.copy_(weight)
        self.given = True

    def _source(self, name: str, weights: Mapping[str, Tensor]) -> str:
        """The name under which the weights hold this one, which may be tied to another; empty if they do not."""
        tied = [alias for alias, p in self.weights.items() if p is self.weights[name]]
        return next((alias for alias in [name, *tied] if alias in weights), "")

    def read(self, directory: Path) -> None:
        """Take the weights from a checkpoint's files, if all of them are there under the model's own names."""
        stored = StoredTensors.of(directory, f"target {str(directory)!r}")
        names = [name for name in self.weights if name in stored]
        tensors = {name: stored.read(name) for name in names}
        if all(self._source(name, tensors) for name in self.weights):
            self.set(tensors)

    def __call__(
        self,
        token_BN: Tensor,
        kv: Any,
        ancestor_BNN: Tensor | Documents | None,
        position_BN: Tensor,
        taps: Taps,
        logit_row_BR: Tensor | None = None,
    ) -> TargetOut:
        raise UserError(f"{SHAPES_ALONE}; give the states of your own forward pass")

    def frozen(self) -> HFTarget:
        raise UserError(f"{SHAPES_ALONE}; give the model itself")


def set_depth_of_copy(config: Any) -> Any:
    """The configuration of a model with one block and the same ends."""
    one_block_config = copy.deepcopy(config)
    set_depth(one_block_config, 1)
    return one_block_config


def ends_of(target: str | Path | PreTrainedConfig, options: TargetOptions, tokenizer: Any = None) -> EndsTarget:
    """The ends of the target at a directory or hub id, or with this configuration; a directory's weights are read.

    Raises UserError for a path without a usable configuration.
    """
    if isinstance(target, PreTrainedConfig):
        return EndsTarget(target, options, tokenizer)
    try:
        config = AutoConfig.from_pretrained(str(target), revision=options.revision, trust_remote_code=options.trust_remote_code)
    except Exception as error:  # libraries raise errors of every kind for damaged files
        cause = reason(error, str(target), options.revision)
        raise UserError(f"target {str(target)!r} has no configuration that transformers can load: {cause}") from error
    ends_target = EndsTarget(config, options, tokenizer)
    if Path(target).is_dir() and any(Path(target).glob("*.safetensors*")):
        ends_target.read(Path(target))
    return ends_target
