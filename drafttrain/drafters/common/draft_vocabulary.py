"""A drafter's own head, over the target's vocabulary or a part of it.

Shapes: D the drafter's vocabulary, V the target's, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.model.drafter import Candidates, Drafter, FrozenRef
from drafttrain.model.layers import Linear
from drafttrain.model.target import Target


class DraftVocabulary(Drafter):
    """d2t, t2d: as the official code of EAGLE-3 saves them: target id = i + d2t[i]; whether a target token is in the drafter's
    vocabulary. They are None where the vocabulary is the target's.
    """

    d2t: Tensor | None
    t2d: Tensor | None
    _target: FrozenRef[Target]

    def add_head(self, vocab: int | None) -> None:
        """Make the head. vocab: so many of the target's tokens; None: all."""
        shape = self._target.module.shape
        if vocab is not None and not 1 <= vocab <= shape.vocab_size:
            raise UserError(f"drafter.draft_vocab is {vocab}; the target has {shape.vocab_size} tokens, leave it out for all")
        self.lm_head = Linear(shape.hidden_size, vocab or shape.vocab_size, bias=False)
        self.add_vocabulary(vocab)
        self._choose(torch.arange(vocab or shape.vocab_size))

    def add_vocabulary(self, vocab: int | None) -> None:
        """Make the names of the drafter's tokens. vocab: as for `add_head`."""
        target_vocab = self._target.module.shape.vocab_size
        self.register_buffer("d2t", None if vocab is None else torch.zeros(vocab, dtype=torch.long))
        self.register_buffer("t2d", None if vocab is None else torch.zeros(target_vocab, dtype=torch.bool))

    def _choose(self, ids_D: Tensor) -> None:
        """Take these target tokens, ascending, for the vocabulary; the head starts from the target's rows of them."""
        head_weight = self._target.module.head_weight.detach()
        self.lm_head.weight.data.copy_(head_weight[ids_D.to(head_weight.device)])
        if self.d2t is not None and self.t2d is not None:
            ids_D = ids_D.to(self.d2t.device)
            self.d2t.copy_(ids_D - torch.arange(len(ids_D), device=ids_D.device))
            self.t2d.zero_().index_fill_(0, ids_D, True)

    def prepare(self, counts: Callable[[], Tensor]) -> None:
        if self.d2t is not None:
            self._choose(counts().argsort(descending=True, stable=True)[: len(self.d2t)].sort().values)

    @property
    def ids(self) -> Tensor | None:
        """[D] the target's ids of the drafter's vocabulary, ascending; None: it is the target's."""
        return None if self.d2t is None else self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def candidates(self, rows: int, drafts: int) -> Candidates | None:
        """The drafter's vocabulary, if it is not the target's."""
        if self.ids is None:
            return None
        return Candidates(self.ids.expand(rows, drafts, -1), self._target.module.shape.vocab_size)
