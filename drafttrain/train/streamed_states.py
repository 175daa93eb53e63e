"""The reference of `features.target=ends`: a target's states of one text, computed block by block once, then kept in a file.

The states of all blocks are kept, so that one file serves every drafter of a target, whatever its data. It is named by what the
states depend on: the checkpoint's files and their times, its configuration, its ends, the dtype, the tokens and transformers'
version. The fingerprint, which needs every block, is in the file.

The target runs over the sequence block by block (`stream`): a block's weights are read when it is due, and dropped after it. So
memory holds what is outside the blocks, and one block. Every weight is read once; the fingerprint is taken on the way.

Shapes: B rows, T positions, H hidden.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from drafttrain.core.console import counting
from drafttrain.core.errors import UserError
from drafttrain.core.files import atomic_write_bytes, cache_home, sealed, unsealed
from drafttrain.data.prompts import load_prompts
from drafttrain.model.drafter import FrozenRef
from drafttrain.targets.estimate import format_bytes
from drafttrain.targets.frozen_ends import FrozenEnds, KnownStates, LoadedEnds
from drafttrain.targets.load import reason
from drafttrain.targets.pieces import Pieces
from drafttrain.targets.structure import Samples, fingerprint_from, sample_of, sampled
from drafttrain.train.engine import World
from drafttrain.train.progress import Console

TOKENS, PROMPTS = 64, 8  # of the text, and embedded prompts that it is made of
FORM = 1  # of the file
GOING = "going"  # a message between processes


@dataclass(frozen=True, slots=True)
class StreamedStates:
    """Gives the target its known states."""

    ends: LoadedEnds
    longest: int  # tokens of the longest conversation: servers may take no longer text

    def learn(self, world: World, console: Console) -> None:
        """Compute or read them on rank 0, and give them to the target of every process.

        Other processes wait for a message after each block, so that no collective takes longer than a block.
        Raises UserError on all processes where the checkpoint cannot be read.
        """
        states: KnownStates | str
        if world.first:
            try:
                states = self._known(console, lambda _: world.share(GOING))
            except UserError as error:
                states = str(error)
            world.share(states)
        else:
            while (states := world.share(None)) == GOING:
                pass
        if isinstance(states, str):
            raise UserError(states)
        self.ends.target.learn(states)
        self.ends.target.drop_others()
        self.ends.loaded.description["fingerprint"] = states.fingerprint

    def _known(self, console: Console, on_block: Callable[[int], object]) -> KnownStates:
        ids, pieces = self._ids(), self.ends.pieces
        file = cache_home() / "targets" / f"{self._key(ids)}.safetensors"
        if (cached_states := read(file)) is not None:
            console.say(f"features: the target's states of {len(cached_states.ids)} tokens are in {file}")
            return cached_states
        start_time, size = monotonic(), format_bytes(pieces.bytes)
        console.say(f"features: computing the target's states of {len(ids)} tokens block by block ({size} of weights, once)")
        with counting(console.rich, "features", pieces.count, "blocks/s") as advance:

            def tell(number: int) -> None:
                advance(1)
                on_block(number)

            try:
                states = stream(self.ends.target, pieces, ids, tell)
            except (UserError, torch.OutOfMemoryError, MemoryError):
                raise
            except Exception as error:  # libraries raise errors of every kind for damaged files
                cause = reason(error, pieces.place, pieces.files.revision)
                raise UserError(
                    f"{pieces.origin} could not be run block by block: {cause}; set features.target=whole"
                ) from error
        report = f"features: computed in {monotonic() - start_time:,.0f} s"
        try:
            atomic_write_bytes(file, packed(states), f"free space under {file.parent}, or set XDG_CACHE_HOME")
            console.say(f"{report}, kept in {file}")
        except UserError as error:
            console.say(f"{report}, but not kept: {error}")
        except OSError as error:
            cause = f"{file.parent} cannot be written ({error.strerror})"
            console.say(f"{report}, but not kept: {cause}; set XDG_CACHE_HOME to another folder, or every run computes them")
        return states

    def _ids(self) -> list[int]:
        """The text: the beginning of embedded prompts."""
        text = "\n".join(str(prompt.turns[0]) for prompt in load_prompts("embedded", PROMPTS))
        ids = list(self.ends.loaded.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        return ids[: min(TOKENS, self.longest)]

    def _key(self, ids: list[int]) -> str:
        pieces, target = self.ends.pieces, self.ends.target
        attention = target.model.config.get_text_config()._attn_implementation
        key_fields: list[Any] = [FORM, transformers.__version__, pieces.files.identity, pieces.config.to_json_string(), ids]
        key_fields += [fingerprint_from(outside_samples(target)), str(target.dtype), attention]
        return hashlib.sha256(json.dumps(key_fields).encode()).hexdigest()[:24]


def packed(known: KnownStates) -> bytes:
    """The content of the file."""
    tensors = {"hidden": torch.stack([known.hidden[block] for block in sorted(known.hidden)]), "final": known.final_TH}
    tensors = {name: x.contiguous() for name, x in tensors.items()}
    metadata = {"ids": known.ids, "fingerprint": known.fingerprint, "wrong_tap": known.wrong_tap, "tensors": _digest(tensors)}
    return save(tensors, {"drafttrain": json.dumps(sealed(metadata))})


def read(file: Path) -> KnownStates | None:
    """The states in a file; None where there is none, or it is damaged: they are computed again."""
    try:
        with safe_open(file, "pt") as reader:
            metadata = unsealed(json.loads(reader.metadata()["drafttrain"]))
            tensors = {name: reader.get_tensor(name) for name in ("hidden", "final")}
        if metadata is None or metadata["tensors"] != _digest(tensors):
            return None
        hidden = dict(enumerate(tensors["hidden"]))
        return KnownStates(metadata["ids"], hidden, tensors["final"], metadata["fingerprint"], metadata["wrong_tap"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype};".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


class _StreamedBlock(nn.Module):
    """In the place of a block: reads it, runs it and drops it. Other attributes are those of the block without weights."""

    def __init__(self, outline: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self._outline, self._run = FrozenRef(outline), run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_outline"].module, name)


class _Stream:
    """The states of one pass."""

    def __init__(self, pieces: Pieces, device: torch.device, done: Callable[[int], None]) -> None:
        self.pieces, self.device, self.done = pieces, device, done
        self.samples: Samples = {}
        self.hidden: dict[int, Tensor] = {}
        self.final_TH: Tensor | None = None
        self.wrong_tap: int | None = None

    def run(self, number: int, *args: Any, **kwargs: Any) -> Any:
        """The output of a block."""
        hidden_states: Tensor = args[0] if args else kwargs["hidden_states"]
        if number and self.wrong_tap is None and not torch.equal(hidden_states[0], self.hidden[number - 1]):
            self.wrong_tap = number - 1  # the model changes a block's output before the next block reads it
        block = self.pieces.block(number)
        name = f"{self.pieces.prefix}.{number}"
        self.samples |= {f"{name}.{param_name}": sampled(*sample_of(p)) for param_name, p in block.named_parameters()}
        out = block.to(self.device)(*args, **kwargs)
        del block
        self.hidden[number] = (out[0] if isinstance(out, tuple) else out)[0].clone()
        if self.wrong_tap is None and self.hidden[number].ndim != 2:
            self.wrong_tap = number  # several states of each position
        self.done(number)
        return out

    def keep_final(self, module: nn.Module, args: Any, out: Any) -> None:
        self.final_TH = (out[0] if isinstance(out, tuple) else out.last_hidden_state)[0]


@torch.no_grad()
def stream(target: FrozenEnds, pieces: Pieces, ids: Sequence[int], done: Callable[[int], None]) -> KnownStates:
    """The target's states of these tokens. done: called after each block, with its number.

    Raises UserError for damaged files, and weights that do not fill the model.
    """
    model: Any = target.model
    state, blocks = _Stream(pieces, target.device, done), model.get_submodule(pieces.prefix)
    state.samples |= outside_samples(target)
    outlines = list(blocks)
    backbone: Any = target.backbone.module
    handle = backbone.register_forward_hook(state.keep_final)
    try:
        for number, outline in enumerate(outlines):
            blocks[number] = _StreamedBlock(outline, _numbered(state, number))
        backbone(input_ids=torch.tensor([list(ids)], device=target.device), use_cache=False)
    finally:
        handle.remove()
        for number, outline in enumerate(outlines):
            blocks[number] = outline
    pieces.check_read(target.model)
    assert state.final_TH is not None
    hidden = {number: x_TH.cpu() for number, x_TH in state.hidden.items()}
    return KnownStates(list(ids), hidden, state.final_TH.cpu(), fingerprint_from(state.samples), state.wrong_tap)


def outside_samples(target: FrozenEnds) -> Samples:
    """What the fingerprint depends on outside of the blocks."""
    return {name: sampled(*sample_of(p)) for name, p in target.model.named_parameters() if not p.is_meta}


def _numbered(state: _Stream, number: int) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return state.run(number, *args, **kwargs)

    return run
