"""ReDrafter: a recurrent head on the target's last state; the prefixes that its beams share are verified once
(arXiv 2403.09919).

Shapes: B rows, T positions, W beams, w of them that go on (1 at first), L steps, M = 1 + W L candidates, N tree nodes,
P = B T, S slots, H hidden, V vocabulary.

At index t step i (from 0) knows the tokens x[t+1 .. t+1+i], folded into its recurrent state s, and predicts x[t+2+i] from
[h[t]; s]. The parameters are the same for all steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.core.tree import DraftTree, TreeShape, tuned_paths
from drafttrain.drafters import Family
from drafttrain.drafters.common.pending import LastState
from drafttrain.drafters.options import ReDrafterOptions
from drafttrain.model.batch import Prediction, TrainBatch
from drafttrain.model.drafter import Drafter, FrozenRef
from drafttrain.model.layers import Linear, ResidualBlock, recomputed
from drafttrain.model.proposal import Proposal
from drafttrain.model.target import FINAL, Taps, Target
from drafttrain.ops.build_tree import MOST_CANDIDATES, build_tree
from drafttrain.ops.top import top, top_log
from drafttrain.ops.tree_bits import MOST_NODES, ancestors_of


@dataclass(frozen=True, slots=True)
class Search:
    """All states of a search, level by level, root first; within a level the likeliest first."""

    token_BM: Tensor
    parent_BM: Tensor  # -1 for the root
    score_BM: Tensor  # log-probability of the path from the root
    final_BM: Tensor | None  # whether a final beam begins with it; None: every state is offered


class BeamProposal(Proposal):
    """The prefix tree of the beams. Its shape changes from step to step, its node count does not.

    `paths` is an estimate, because beams are not rank paths. After training it is the best static tree of as many nodes by
    held-out ranks: about the acceptance of the beams if they did not adapt to the text. Before, one chain for each first token.
    """

    def __init__(self, options: ReDrafterOptions) -> None:
        super().__init__(options.length, [(rank,) + (0,) * d for d in range(options.length) for rank in range(options.width)])
        self.width, self._nodes_given = options.width, options.nodes

    @property
    def beams(self) -> int:
        """One where a chain was tuned (for a target that verifies no trees)."""
        return self.width if any(any(path) for path in self._paths) else 1

    @property
    def nodes(self) -> int:
        """Drafts of a proposal, at most."""
        return min(self._nodes_given or len(self._paths), self.beams * self.draft_length, MOST_NODES - 1)

    @property
    def max_nodes(self) -> int:
        return 1 + self.nodes

    @property
    def tunable(self) -> bool:
        return True

    def tune(self, sequences: Sequence[Tensor], nodes: int) -> None:
        """Set the node budget, unless the options give one, and the estimate `paths`."""
        budget = min(self._nodes_given or nodes, self.width * self.draft_length, MOST_NODES - 1)
        self._paths = tuned_paths([ranks_MK[:, : self.draft_length] for ranks_MK in sequences], budget) or [(0,)]

    def settings(self) -> dict[str, Any]:
        return {"tree": [list(p) for p in self._paths]}

    def use(self, settings: Mapping[str, Any]) -> None:
        super().use(settings)
        if "tree" in settings:
            self._paths = list(TreeShape.of(settings["tree"]).paths)


class ReDrafter(Drafter):
    """Proposes the prefix tree of its beams."""

    proposal: BeamProposal
    revertible = True

    def __init__(self, options: ReDrafterOptions, target: Target) -> None:
        width, vocab = target.shape.hidden_size, target.shape.vocab_size
        self._check(options, vocab)
        super().__init__(BeamProposal(options))
        self.taps, self.steps, self.dropped = Taps(final=True), options.steps, options.dropped
        self.rnn_w = nn.Linear(width, width, bias=False)  # of the token's embedding
        self.rnn_u = nn.Linear(width, width)  # of the state before
        output = Linear(2 * width, vocab, bias=False)
        output.weight.data.zero_()[:, :width].copy_(target.head_weight.detach())
        self.lm_head = nn.Sequential(*(ResidualBlock(2 * width) for _ in range(options.layers)), output)
        self._target = FrozenRef(target)

    @staticmethod
    def _check(options: ReDrafterOptions, vocab: int) -> None:
        if options.width > vocab or 1 + options.width * options.length > MOST_CANDIDATES:
            raise UserError(
                f"{options.width} beams of {options.length} drafts; there are {vocab} tokens and room for "
                f"{MOST_CANDIDATES - 1} drafts; set drafter.width or drafter.length lower"
            )

    def recur(self, token: Tensor, recurrent_H: Tensor) -> Tensor:
        """[..., H] the state after one more token."""
        embedded_H = self._target.module.embed(token).to(recurrent_H.dtype)
        return F.silu(self.rnn_w(embedded_H) + self.rnn_u(recurrent_H))

    def head_input(self, hidden_H: Tensor, recurrent_H: Tensor) -> Tensor:
        """[..., 2 H] the input of the output matrix."""
        x_2H, (*blocks, _) = torch.cat([hidden_H, recurrent_H], -1), self.lm_head
        for block in blocks:
            x_2H = block(x_2H)
        return x_2H

    def training_positions(self, length: int) -> int:
        return length * self.steps

    @property
    def _predicted_steps(self) -> int:
        return self.steps if self.training else max(self.steps, self.draft_length)

    @property
    def label_offset(self) -> int:
        return self._predicted_steps + 1

    def predict(self, batch: TrainBatch) -> Iterator[Prediction]:
        """In evaluation it goes on to the draft length, so that every depth that decoding proposes is predicted."""
        hidden_PH = batch.hidden[FINAL].flatten(0, 1)
        recurrent_PH = torch.zeros_like(hidden_PH)
        for step in range(self._predicted_steps):
            recurrent_PH = self.recur(batch.after(1 + step).flatten(), recurrent_PH)
            pairs = batch.future(2 + step)
            sources = (hidden_PH[pairs.source_M], recurrent_PH[pairs.source_M])
            joined_M = recomputed(self.recomputes, self.head_input, *sources)
            yield Prediction(step, pairs.source_M, pairs.label_M, joined_M, self.lm_head[-1])

    def open(self, slots: int, max_len: int) -> ReDrafterState:
        return ReDrafterState(self, slots)


class ReDrafterState(LastState):
    def __init__(self, drafter: ReDrafter, slots: int) -> None:
        weight = drafter.rnn_u.weight
        super().__init__(slots, weight.shape[0], weight)
        self.drafter = drafter

    def propose(self, slot_B: Tensor, sampling: Sampling, depth: int | None = None) -> DraftTree:
        drafter = self.drafter
        steps = min(drafter.draft_length, depth or drafter.draft_length)
        search = self._search(self.hidden_SH[slot_B], self.root_S[slot_B], steps)
        return prefix_tree(search, 1 + min(drafter.proposal.nodes, search.token_BM.shape[1] - 1))

    def _search(self, hidden_BH: Tensor, root_B: Tensor, steps: int) -> Search:
        """Each step keeps the `beams` likeliest continuations of all; two that share a prefix share its nodes."""
        drafter, beams, hidden_B1H = self.drafter, self.drafter.proposal.beams, hidden_BH[:, None]
        token_Bw, recurrent_BwH = root_B[:, None], torch.zeros_like(hidden_B1H)
        score_Bw = torch.zeros_like(root_B, dtype=torch.float32)[:, None]
        tokens, parents, scores, picked = [token_Bw], [torch.full_like(token_Bw, -1)], [score_Bw], []
        for step in range(steps):
            recurrent_BwH = drafter.recur(token_Bw, recurrent_BwH)
            joined_BwI = drafter.head_input(hidden_B1H.expand_as(recurrent_BwH), recurrent_BwH)
            log_XW, choice_XW = top_log(drafter.lm_head[-1](joined_BwI).flatten(0, 1), beams)
            if step:
                total_BX = (score_Bw[..., None] + log_XW.view(*token_Bw.shape, beams)).flatten(1)
                score_Bw, best_BW = top(total_BX, beams)
                from_BW, token_Bw = best_BW // beams, choice_XW.view(total_BX.shape).gather(1, best_BW)
                recurrent_BwH = recurrent_BwH.gather(1, from_BW[..., None].expand(-1, -1, recurrent_BwH.shape[-1]))
            else:  # the root's choices are in order already
                score_Bw, token_Bw, from_BW = log_XW, choice_XW, torch.zeros_like(choice_XW)
                recurrent_BwH = recurrent_BwH.expand(-1, beams, -1)
            first = 1 + (step - 1) * beams if step else 0  # of the level above
            tokens, parents, scores = [*tokens, token_Bw], [*parents, first + from_BW], [*scores, score_Bw]
            picked.append(from_BW)
        final_BM = None
        if not drafter.dropped:
            final_BM = torch.cat([torch.ones_like(root_B, dtype=torch.bool)[:, None], *survivors(picked)], 1)
        return Search(torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(scores, 1), final_BM)


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


def prefix_tree(found: Search, nodes: int) -> DraftTree:
    """The `nodes` likeliest candidates: of all, or of those that a final beam begins with. Padding follows if they are fewer.

    Beams that share a prefix share its candidates, so each prefix occurs once.
    """
    token_BM, parent_BM, score_BM, count_B = found.token_BM, found.parent_BM, found.score_BM, None
    if found.final_BM is not None:
        order_BM, index_BM = (~found.final_BM).long().argsort(stable=True, dim=-1), found.final_BM.cumsum(-1) - 1
        real_BM = found.final_BM.gather(1, order_BM)
        above_BM = parent_BM.gather(1, order_BM)
        parent_BM = torch.where(above_BM < 0, -1, index_BM.gather(1, above_BM.clamp_min(0)).where(real_BM, 0))
        token_BM, score_BM = token_BM.gather(1, order_BM), score_BM.gather(1, order_BM).where(real_BM, -torch.inf)
        count_B = found.final_BM.sum(-1).clamp_max(nodes)
    built = build_tree(parent_BM, score_BM, nodes)
    count_B = torch.full_like(token_BM[:, 0], nodes) if count_B is None else count_B
    return DraftTree(token_BM.gather(1, built.kept_BN), built.parent_BN, count_B, known_BNN=ancestors_of(built.bits_BNw))


FAMILY = Family("redrafter", ReDrafterOptions, ReDrafter)
