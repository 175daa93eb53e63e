"""ReDrafter: a recurrent head on the target's last state; the prefixes that its beams share are verified once
(arXiv 2403.09919).

Shapes: B rows, T positions, W beams, w of them that go on (1 at first), L steps, M = 1 + W L candidates, N tree nodes,
P = B T, S slots, H hidden, V vocabulary.

At index t step i (from 0) knows the tokens x[t+1 .. t+1+i], folded into its recurrent state s, and predicts x[t+2+i] from
[h[t]; s]. The parameters are the same for all steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.core.tree import DraftTree, Path, TreeShape, tuned_paths
from drafttrain.drafters import Family
from drafttrain.drafters.common.last_state import Tip, TipDrafter, blank
from drafttrain.model.batch import Prediction, TrainBatch
from drafttrain.model.frozen_ref import FrozenRef
from drafttrain.model.layers import ResidualBlock, recomputed
from drafttrain.model.target import FINAL, Taps, Target
from drafttrain.ops.build_tree import MOST_CANDIDATES, build_tree
from drafttrain.ops.top import top
from drafttrain.ops.tree_attention import MOST_NODES, ancestors_of


@dataclass
class ReDrafterOptions:
    """The head, how far it is unrolled in training, and the beam search."""

    family: str = "redrafter"
    layers: int = 2  # residual blocks before the output matrix
    steps: int = 5  # unrolled in training
    width: int = 10  # beams
    length: int = 4  # drafts in a beam; the official length counts the root too
    nodes: int | None = None  # most drafts of a proposal, the likeliest first; None: decode.tree_nodes, set after training
    dropped: bool = True  # offer also the states that the search had among its beams once and left; officially not


@dataclass(frozen=True, slots=True)
class Search:
    """What a search went through, level by level, root first; within a level the likeliest first.

    parent_BM: -1 for the root. score_BM: log-probability of the path from the root. final_BM: whether a final beam begins
    with it.
    """

    token_BM: Tensor
    parent_BM: Tensor
    score_BM: Tensor
    final_BM: Tensor


class ReDrafter(TipDrafter):
    """Proposes the prefix tree of its beams: its shape changes from round to round, its node count does not."""

    def __init__(self, options: ReDrafterOptions, target: Target) -> None:
        super().__init__()
        width, vocab = target.shape.hidden_size, target.shape.vocab_size
        self._check(options, vocab)
        self.taps, self.draft_length = Taps(final=True), options.length
        self.steps, self.width, self.dropped, self._fixed = options.steps, options.width, options.dropped, options.nodes
        self.rnn_w = nn.Linear(width, width, bias=False)  # of the token's embedding
        self.rnn_u = nn.Linear(width, width)  # of the state before
        output = nn.Linear(2 * width, vocab, bias=False)
        output.weight.data.zero_()[:, :width].copy_(target.head_weight.detach())
        self.lm_head = nn.Sequential(*(ResidualBlock(2 * width) for _ in range(options.layers)), output)
        self._target = FrozenRef(target)
        self._paths: list[Path] = [(rank,) + (0,) * d for d in range(options.length) for rank in range(options.width)]

    @staticmethod
    def _check(options: ReDrafterOptions, vocab: int) -> None:
        for name in ("layers", "steps", "width", "length"):
            if getattr(options, name) < 1:
                raise UserError(f"drafter.{name} is {getattr(options, name)}; set it to 1 or more")
        if options.width > vocab or 1 + options.width * options.length > MOST_CANDIDATES:
            raise UserError(
                f"{options.width} beams of {options.length} drafts; there are {vocab} tokens and room for "
                f"{MOST_CANDIDATES - 1} drafts; set drafter.width or drafter.length lower"
            )
        if options.nodes is not None and not 1 <= options.nodes < MOST_NODES:
            raise UserError(f"drafter.nodes is {options.nodes}; set it within 1 and {MOST_NODES - 1}, or leave it out")

    def _recur(self, token: Tensor, recurrent_H: Tensor) -> Tensor:
        """[..., H] the state after one more token."""
        embedded_H = self._target.module.embed(token).to(recurrent_H.dtype)
        return F.silu(self.rnn_w(embedded_H) + self.rnn_u(recurrent_H))

    def _hidden(self, hidden_H: Tensor, recurrent_H: Tensor) -> Tensor:
        """[..., 2 H] what the output matrix reads."""
        x_2H, (*blocks, _) = torch.cat([hidden_H, recurrent_H], -1), self.lm_head
        for block in blocks:
            x_2H = block(x_2H)
        return x_2H

    def fed(self, length: int) -> int:
        return length * self.steps

    @property
    def _unrolled(self) -> int:
        return self.steps if self.training else max(self.steps, self.draft_length)

    @property
    def ahead(self) -> int:
        return self._unrolled + 1

    def predict(self, batch: TrainBatch) -> Iterator[Prediction]:
        """In evaluation it goes on to the draft length, so that every depth that decoding proposes is foretold."""
        hidden_PH = batch.hidden[FINAL].flatten(0, 1)
        recurrent_PH = torch.zeros_like(hidden_PH)
        for step in range(self._unrolled):
            recurrent_PH = self._recur(batch.after(1 + step).flatten(), recurrent_PH)
            pairs = batch.future(2 + step)
            sources = (hidden_PH[pairs.source_M], recurrent_PH[pairs.source_M])
            joined_M = recomputed(self.recomputes, self._hidden, *sources)
            yield Prediction(step, pairs.source_M, pairs.label_M, joined_M, self.lm_head[-1])

    def open(self, slots: int, max_len: int) -> Tip:
        like = self.rnn_u.weight
        return Tip(*blank(slots, like.shape[0], like))

    def propose(self, state: Tip, slot_B: Tensor, sampling: Sampling, depth: int | None = None) -> DraftTree:
        steps = min(self.draft_length, depth or self.draft_length)
        found = self._search(state.hidden_SH[slot_B], state.root_S[slot_B], steps)
        return prefix_tree(found, 1 + min(self.nodes, found.token_BM.shape[1] - 1), self.dropped)

    def _search(self, hidden_BH: Tensor, root_B: Tensor, steps: int) -> Search:
        """Each step keeps the `beams` likeliest continuations of all; two that share a prefix share its nodes."""
        beams, hidden_B1H = self.beams, hidden_BH[:, None]
        token_Bw, recurrent_BwH = root_B[:, None], torch.zeros_like(hidden_B1H)
        score_Bw = torch.zeros_like(root_B, dtype=torch.float32)[:, None]
        tokens, parents, scores, picked = [token_Bw], [torch.full_like(token_Bw, -1)], [score_Bw], []
        for step in range(steps):
            recurrent_BwH = self._recur(token_Bw, recurrent_BwH)
            joined_BwI = self._hidden(hidden_B1H.expand_as(recurrent_BwH), recurrent_BwH)
            logits_XV = self.lm_head[-1](joined_BwI).flatten(0, 1)
            best_XW, choice_XW = top(logits_XV, beams)
            log_XW = best_XW - logits_XV.float().logsumexp(-1, keepdim=True)
            reach_BX = (score_Bw[..., None] + log_XW.view(*token_Bw.shape, beams)).flatten(1)
            score_Bw, place_BW = top(reach_BX, beams)
            from_BW = place_BW // beams
            token_Bw = choice_XW.view(reach_BX.shape).gather(1, place_BW)
            recurrent_BwH = recurrent_BwH.gather(1, from_BW[..., None].expand(-1, -1, recurrent_BwH.shape[-1]))
            first = 1 + (step - 1) * beams if step else 0  # of the level above
            tokens, parents, scores = [*tokens, token_Bw], [*parents, first + from_BW], [*scores, score_Bw]
            picked.append(from_BW)
        final_BM = torch.cat([torch.ones_like(root_B, dtype=torch.bool)[:, None], *survivors(picked)], 1)
        return Search(torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(scores, 1), final_BM)

    @property
    def beams(self) -> int:
        """Where a chain was tuned (a target that verifies no trees) a single one is searched."""
        return self.width if any(any(path) for path in self._paths) else 1

    @property
    def nodes(self) -> int:
        """Most drafts of a proposal."""
        return min(self._fixed or len(self._paths), self.beams * self.draft_length, MOST_NODES - 1)

    @property
    def max_nodes(self) -> int:
        return 1 + self.nodes

    def paths(self) -> list[Path]:
        """A stand-in: beams are no rank paths, which ones they are differs from round to round.

        After training the best static tree of as many nodes, by held-out ranks: about what the beams are worth, if the text
        at hand chose nothing. Before, one chain for each first token.
        """
        return list(self._paths)

    def tune(self, texts: Sequence[Tensor], nodes: int) -> None:
        """The node budget, unless the options give one, and the stand-in of `paths`."""
        budget = min(self._fixed or nodes, self.width * self.draft_length, MOST_NODES - 1)
        self._paths = tuned_paths([text[:, : self.draft_length] for text in texts], budget) or [(0,)]

    def decode_settings(self) -> dict[str, Any]:
        return {"tree": [list(p) for p in self._paths]}

    def use_decode_settings(self, settings: dict[str, Any]) -> None:
        if "tree" in settings:
            self._paths = list(TreeShape.of(settings["tree"]).paths)


def survivors(picked: Sequence[Tensor]) -> list[Tensor]:
    """[B, W] bool for each level: whether a beam of the last one goes through it.

    picked: at each level, which beam of the level above each one continues. (0, 0), (1, 1) keep (no, yes), (yes, yes).
    """
    alive_BW = torch.ones_like(picked[-1], dtype=torch.bool)
    levels, beam_W = [alive_BW], torch.arange(alive_BW.shape[1], device=alive_BW.device)
    for from_BW in reversed(picked[1:]):
        alive_BW = ((from_BW[..., None] == beam_W) & alive_BW[..., None]).any(1)
        levels.insert(0, alive_BW)
    return levels


def prefix_tree(found: Search, nodes: int, dropped: bool) -> DraftTree:
    """The `nodes` likeliest candidates that a final beam begins with, or of all; padding behind them where they are fewer.

    Beams that share a prefix came by the same candidates, so each prefix stands here once.
    """
    stays_BM = torch.ones_like(found.final_BM) if dropped else found.final_BM
    order_BM = (~stays_BM).long().argsort(stable=True, dim=-1)
    place_BM = stays_BM.cumsum(-1) - 1
    real_BM = stays_BM.gather(1, order_BM)
    above_BM = found.parent_BM.gather(1, order_BM)
    parent_BM = torch.where(above_BM < 0, -1, place_BM.gather(1, above_BM.clamp_min(0)).where(real_BM, 0))
    score_BM = found.score_BM.gather(1, order_BM).where(real_BM, -torch.inf)
    built = build_tree(parent_BM, score_BM, nodes)
    token_BN = found.token_BM.gather(1, order_BM).gather(1, built.kept_BN)
    count_B = stays_BM.sum(-1).clamp_max(nodes)
    return DraftTree(token_BN, built.parent_BN, count_B, known_BNN=ancestors_of(built.bits_BN))


FAMILY = Family("redrafter", ReDrafterOptions, ReDrafter)
