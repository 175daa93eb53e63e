"""Native MTP: the module that a target comes with, taken from its checkpoint and trained further for several depths.

Shapes: B rows, N positions or nodes, T positions, A pending positions, C of them, M predictions, h KV heads, D head width,
X width of a further input, H hidden, V vocabulary.

    x[t+1] -- target's embedding -- enorm --.
                                            eh_proj (2H -> H) -- a block of the target's class -- h' -- norm -- target's head
    h[t], the target's ------------ hnorm --'                                                             |
      ^                                                                                                   |
      '--- one depth further: the output of the norm, or h', as the layout says  <------------------------'

`common/own_modules.py` has the layouts. One module makes every depth and is trained on its own outputs so (arXiv 2509.18362).
Where there are several, each makes one depth (`DepthState`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.core.tree import DraftTree
from drafttrain.decoding.graph_runner import why_waiting
from drafttrain.drafters import Family
from drafttrain.drafters.common.own_modules import LAYOUTS, Numbered, OwnModule, count_of, layout_of, open_source
from drafttrain.drafters.common.pending import CachedState, concatenated
from drafttrain.drafters.common.proposal import TreeProposal
from drafttrain.drafters.common.recurrent import FeedsBack, Passes
from drafttrain.drafters.options import MTPNativeOptions
from drafttrain.model.batch import Pairs, Prediction, TrainBatch
from drafttrain.model.drafter import Commit, FrozenRef, draft_chain
from drafttrain.model.kv_storage import PAGE
from drafttrain.model.layers import recomputed
from drafttrain.model.target import FINAL, Taps, Target
from drafttrain.targets.hf import HFTarget
from drafttrain.targets.one_block import (
    BlockPass,
    BlockPositions,
    StepKeys,
    forward,
    new_block,
    new_norm,
    unrolled_pass,
)
from drafttrain.targets.weights import StoredTensors, directory_of


class PerDepth(Protocol):
    """A drafter with a module for each depth."""

    @property
    def draft_length(self) -> int: ...

    @property
    def modules_count(self) -> int: ...

    def passes(self, slots: int, positions: int) -> Passes:
        """An empty cache with a layer for each module."""
        ...

    def fuse(self, hidden: dict[int, Tensor]) -> Tensor:
        """[..., H] the state that module 0 reads."""
        ...

    def depth(self, number: int, token_BA: Tensor, state_BAH: Tensor, positions: Passes) -> Tensor:
        """[B, A, H] the state of a module at the columns after each row's prefix, which become scratch of its cache."""
        ...

    def logits(self, state_H: Tensor) -> Tensor: ...


def split_at(commit: Commit, keep_B: Tensor, columns: int) -> Commit:
    """Each row's positions after its first `keep_B`, at most `columns`, left-aligned."""
    column_BC = keep_B[:, None] + torch.arange(columns, device=keep_B.device)
    column_BC = column_BC.clamp_max(commit.token_BA.shape[1] - 1)
    index_BC1 = column_BC[..., None]
    hidden = {key: x.gather(1, index_BC1.expand(-1, -1, x.shape[-1])) for key, x in commit.hidden.items()}
    return Commit(commit.token_BA.gather(1, column_BC), commit.next_BA.gather(1, column_BC), hidden, commit.count_B - keep_B)


class DepthState(CachedState):
    """The state of a drafter with a module for each depth, as DeepSeek-V3 trains them (arXiv 2412.19437, section 2.2).

    It drafts chains. At index t module k (from 0) reads the token x[t+1+k] and the state of module k-1 at t, module 0 the
    target's. It sees its own keys at 0..t and predicts x[t+2+k].

    Worked example: two modules, text `a b c` with the root r. Module 0 reads (b, h[0]), (c, h[1]), (r, h[2]) and drafts d.
    Module 1 then reads c, r, d at the same indices and drafts e. Its token at index 2 is a draft, so it reads index 2 again
    when that token is known: the last positions, one fewer than the modules, stay pending, and every cache holds the positions
    before them.
    """

    def __init__(self, drafter: PerDepth, slots: int, max_len: int) -> None:
        self.drafter = drafter
        self.again = drafter.modules_count - 1  # positions that some module reads again
        self.cached = drafter.passes(slots, max_len + drafter.draft_length)
        super().__init__(self.cached.kv, slots, drafter.draft_length)

    def observe_prompt(self, commit: Commit, slot_B: Tensor) -> None:
        if self.pending.most:
            commit = concatenated(self.pending.take(slot_B, self.again, others=True), commit)
        self._consume_all_but_last(commit, slot_B)

    def take_pending(self, slot_B: Tensor) -> Commit:
        return self.pending.take(slot_B, self.pending.step + self.again if self.kv.static else None)

    def consume(self, commit: Commit, slot_B: Tensor) -> None:
        """Bring all but each row's last positions into the caches."""
        chain = DepthChain(self, commit, slot_B)
        for _ in range(1, self.drafter.modules_count):
            chain.next(torch.zeros_like(commit.root_B))

    def _consume_all_but_last(self, commit: Commit, slot_B: Tensor) -> None:
        self.consume(commit, slot_B)
        self._keep(commit, slot_B)

    def _keep(self, commit: Commit, slot_B: Tensor) -> None:
        """Commit the positions that no module reads again; the others stay pending."""
        keep_B = (commit.count_B - self.again).clamp_min(0)
        self.cached.keep_first(keep_B)
        self.pending.add(split_at(commit, keep_B, self.again), slot_B, empty=True)

    def propose(self, slot_B: Tensor, sampling: Sampling, depth: int | None = None) -> DraftTree:
        drafter, pending = self.drafter, self.take_pending(slot_B)
        chain = DepthChain(self, pending, slot_B)
        steps = min(drafter.draft_length, depth or drafter.draft_length)
        position_B = self.kv.length_B + pending.count_B
        tree = draft_chain(pending.root_B, chain.logits(), chain.next, steps, sampling, position_B)
        while chain.number + 1 < drafter.modules_count:
            chain.next(torch.zeros_like(pending.root_B))  # their keys of known tokens are needed all the same
        self._keep(pending, slot_B)
        return tree


class DepthChain:
    """One pass of the modules over the pending positions, one after another."""

    def __init__(self, state: DepthState, commit: Commit, slot_B: Tensor) -> None:
        state.kv.rows(slot_B)
        self.state, self.last_B1, self.number = state, commit.last_B1, 0
        self.token_BA = commit.next_BA
        self.state_BAH = self._run(state.drafter.fuse(commit.hidden))

    def _run(self, state_BAH: Tensor) -> Tensor:
        return self.state.drafter.depth(self.number, self.token_BA, state_BAH, self.state.cached)

    def logits(self) -> Tensor:
        """[B, V] of the token after each row's last one."""
        index_B1H = self.last_B1[..., None].expand(-1, 1, self.state_BAH.shape[-1])
        return self.state.drafter.logits(self.state_BAH.gather(1, index_B1H))[:, 0]

    def next(self, token_B: Tensor) -> Tensor:
        """Run the next module, whose tokens are one later. token_B: the one after each row's last; as `logits`."""
        self.number += 1
        later_BA = torch.cat([self.token_BA[:, 1:], self.token_BA[:, -1:]], 1)
        self.token_BA = later_BA.scatter(1, self.last_B1, token_B[:, None])
        self.state_BAH = self._run(self.state_BAH)
        return self.logits()


class OwnMTPModule(nn.Module):
    """The module's parts."""

    def __init__(self, target: HFTarget, number: int) -> None:
        super().__init__()
        width, eps = target.shape.hidden_size, target.shape.norm_eps
        self.block = new_block(target, number)
        self.enorm, self.hnorm, self.norm = (new_norm(self.block, width, eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * width, width, bias=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OwnMTPModule:
        """Buffers keep their precision: a router's biases choose the experts, and transformers keeps them in float32."""
        buffers = {name: buffer for name, buffer in self.named_buffers() if buffer.is_floating_point()}
        super()._apply(fn, recurse)
        for name, buffer in buffers.items():
            owner, _, last = name.rpartition(".")
            setattr(self.get_submodule(owner), last, buffer.to(self.get_buffer(name).device))
        return self


class MTPNative(FeedsBack):
    """The target's embedding and head are shared and frozen."""

    splits = False

    def __init__(self, options: MTPNativeOptions, target: Target) -> None:
        super().__init__(TreeProposal(options, options.draft_length, target), target, options.steps)
        hf_target, self.taps = cast(HFTarget, target), Taps(final=True)
        layout, stored = source_of(options, hf_target)
        self.hidden_first = layout is not None and layout.hidden_first
        normed = layout is None or layout.norm_output
        self.norm_output = normed if options.norm_output is None else options.norm_output
        blocks = hf_target.shape.blocks
        count = options.modules or (1 if stored is None or layout is None else count_of(layout, blocks, stored))
        if count > 1:
            self._check_modules(count)
            self.steps = min(self.steps, count)
        self.decay, decays = options.step_decay, [options.step_decay**step for step in range(self.steps)]
        self.first_weight = 1.0 / sum(decays)
        self.depths = nn.ModuleList(OwnMTPModule(hf_target, depth) for depth in range(count))
        self.rotary: FrozenRef[Any] = FrozenRef(hf_target.backbone.module.rotary_emb)
        self.starts_usable = options.source != "fresh"
        self._waits: dict[tuple[torch.device, torch.dtype], str | None] = {}  # `_why_waiting`
        if stored is not None and layout is not None:
            for depth, module in enumerate(self.depths):
                Numbered(layout, blocks, depth).fill(module, stored)

    def _check_modules(self, count: int) -> None:
        """Raise UserError for what a module for each depth cannot do."""
        if self.draft_length > count:
            raise UserError(
                f"drafter.draft_length is {self.draft_length}, and there are {count} modules, one for each depth; set it to "
                f"{count}, or drafter.modules=1: the first one at every depth"
            )
        if self.proposal.kind != "chain":
            raise UserError(f"drafter.tree is {self.proposal.kind}, and modules for each depth draft chains; set it to chain")
        if not self.norm_output:
            raise UserError("drafter.norm_output is false, and modules for each depth pass on normed states; set it to null")

    @property
    def captured(self) -> bool:
        """transformers' block may wait for the GPU, where it has experts. Tried once on each device and for each dtype."""
        weight = self.module.eh_proj.weight
        if weight.device.type != "cuda":
            return True
        if (weight.device, weight.dtype) not in self._waits:
            self._waits[weight.device, weight.dtype] = self._why_waiting()
        return self._waits[weight.device, weight.dtype] is None

    @torch.no_grad()
    def _why_waiting(self) -> str | None:
        positions, weight = self.passes(1, PAGE), self.module.eh_proj.weight
        positions.kv.use_static_length(1, 1)
        x_11H = weight.new_zeros(1, 1, weight.shape[0])

        def work() -> None:
            meta = positions.meta(positions.after_prefix(1))
            for depth in range(self.modules_count):
                forward(self.module_of(depth).block, self.rotary.module, x_11H, meta)

        work()
        return why_waiting(work)

    @property
    def modules_count(self) -> int:
        """1: one module makes every depth."""
        return len(self.depths)

    @property
    def module(self) -> OwnMTPModule:
        """The first module."""
        return cast(OwnMTPModule, self.depths[0])

    def module_of(self, step: int) -> OwnMTPModule:
        """The module of a draft depth, from 0."""
        return cast(OwnMTPModule, self.depths[step if self.modules_count > 1 else 0])

    def resolved_options(self) -> dict[str, Any]:
        return {"norm_output": self.norm_output, "modules": self.modules_count}

    @property
    def predicted_steps(self) -> int:
        return super().predicted_steps if self.modules_count == 1 else min(super().predicted_steps, self.modules_count)

    def fuse(self, hidden: dict[int, Tensor]) -> Tensor:
        return hidden[FINAL].to(self.module.eh_proj.weight.dtype)

    def enter(self, token_BN: Tensor, state_BNH: Tensor, step: int = 0) -> tuple[Tensor, Tensor]:
        module = self.module_of(step)
        inputs = [module.enorm(self.embed(token_BN, state_BNH)), module.hnorm(state_BNH)]
        joined_BNH = module.eh_proj(torch.cat(inputs[::-1] if self.hidden_first else inputs, -1))
        return joined_BNH, joined_BNH

    def normed(self, x_H: Tensor, delta_H: Tensor | None = None) -> tuple[Tensor, Tensor]:
        state_H = x_H if delta_H is None else x_H + delta_H
        return state_H, self.module.norm(state_H)

    def head(self, normed_H: Tensor) -> Tensor:
        """By the target's head, in its dtype."""
        target = self._target.module
        return target.head(normed_H.to(target.head_weight.dtype))

    # -- the block in decoding

    @property
    def decoding_layers(self) -> MTPNative:
        return self

    def run(self, x_BNH: Tensor, meta: BlockPass, read_BNX: Tensor | None = None) -> tuple[Tensor, None]:
        """(the block's output, None)."""
        return forward(self.module.block, self.rotary.module, x_BNH, meta), None

    def depth(self, number: int, token_BA: Tensor, state_BAH: Tensor, positions: Passes) -> Tensor:
        meta = positions.meta(positions.after_prefix(token_BA.shape[1]))
        return self._step(number, token_BA, state_BAH, replace(meta, position_BN=meta.position_BN + number))

    def _step(self, step: int, token_BN: Tensor, state_BNH: Tensor, meta: BlockPass) -> Tensor:
        """[B, N, H] the new state."""
        module = self.module_of(step)
        out_BNH = forward(module.block, self.rotary.module, self.enter(token_BN, state_BNH, step)[0], meta)
        return module.norm(out_BNH) if self.norm_output else out_BNH

    def passes(self, slots: int, positions: int) -> BlockPositions:
        return BlockPositions(self.modules_count, slots, positions, self.module.eh_proj.weight)

    def open(self, slots: int, max_len: int) -> CachedState:
        return super().open(slots, max_len) if self.modules_count == 1 else DepthState(self, slots, max_len)

    # -- the block in training

    def unroll(
        self, batch: TrainBatch, state_BTH: Tensor, steps: int, detach: bool = False
    ) -> Iterator[tuple[int, Pairs, Tensor]]:
        """A module for each depth sees its own keys alone."""
        keys, values = list[Tensor](), list[Tensor]()

        def advance(step: int, token_BT: Tensor, state_BTH: Tensor, *earlier: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            cache = StepKeys(earlier)
            new_BTH = self._step(step, token_BT, state_BTH, unrolled_pass(batch, step, cache))
            return new_BTH, cache.keys[-1], cache.values[-1]

        for step in range(steps):
            earlier = [*keys, *values] if self.modules_count == 1 else []
            state_BTH, key_BhTD, value_BhTD = recomputed(
                self.recomputes, advance, step, batch.after(1 + step), state_BTH, *earlier
            )
            keys, values = [*keys, key_BhTD], [*values, value_BhTD]
            pairs = batch.future(2 + step)
            yield step, pairs, state_BTH.flatten(0, 1)[pairs.source_M]
            state_BTH = state_BTH.detach() if detach else state_BTH

    def predict(self, batch: TrainBatch) -> Iterator[Prediction]:
        """Each step's state feeds the next, at the same index, not detached."""
        for step, pairs, hidden_MH in self.unroll(batch, self.fuse(batch.hidden), self.predicted_steps):
            weight = self.first_weight * self.decay**step
            yield Prediction(step, pairs.source_M, pairs.label_M, hidden_MH, self.logits, weight)


def source_of(options: MTPNativeOptions, target: HFTarget) -> tuple[OwnModule | None, StoredTensors | None]:
    """(the target's layout, the files to read the modules from); None: it has no known one, there is nothing to read.

    Raises UserError for a target without a layout, and for a source that is not there.
    """
    model_type = str(target.backbone.module.config.model_type)
    if options.source == "fresh":
        return LAYOUTS.get(model_type), None
    layout = layout_of(model_type)
    if target.outline:
        return layout, None
    from_target = options.source == "target"
    directory = directory_of(target.model) if from_target else Path(options.source).expanduser()
    if not from_target and not (directory and directory.is_dir()):
        raise UserError(f"drafter.source is {options.source!r}; set it to target, fresh, or a checkpoint's directory")
    return layout, open_source(directory, f"drafter.source={options.source}")


FAMILY = Family("mtp_native", MTPNativeOptions, MTPNative, early=3)
