"""Scores of all predictions of a batch, and their gradients, which are computed together with the scores.

A chunk of the target's positions at a time: the target's logits once, then, for the predictions of the tokens that follow,
the drafter's logits, the loss, and at once the gradients of the head's input and parameters, as in the Liger kernel's fused
linear cross-entropy (arXiv 2410.10989). Then the logits are dropped. The backward pass only scales the gradients: it runs no
head again.

This needs each prediction's weight in the loss beforehand. Where the weight depends on other predictions' scores
(`Scoring.differentiable`), the backward pass, which then knows it, computes all chunks once more. Parameters that are whole
only while their module runs need torch's own graph (`Scoring.recomputed`).

Shapes: M predictions of a step, C predictions scored at once, H hidden, D the head's columns.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from drafttrain.model.batch import Prediction, TrainBatch
from drafttrain.objective.chunks import LossChunk, PredictionPart, alike, chunks, index_tensor, joined, joined_index
from drafttrain.objective.scores import Terms, scores_of, shared_steps
from drafttrain.objective.teacher import Distribution, Rows

KEEP_NO_OUTPUT = {"MmBackward0", "AddmmBackward0"}  # operators whose gradient does not need their output


@dataclass(frozen=True, slots=True)
class StepScores:
    """Scores of one step's predictions, [M] each."""

    loss_M: Tensor  # divergence
    top1_M: Tensor  # whether the top-1 token is the target's
    acceptance_M: Tensor  # acceptance, sum min(p, q)

    @staticmethod
    def empty(like: Tensor) -> StepScores:
        """For as many predictions as `like` has rows."""
        loss_M, acceptance_M = (like.new_empty(len(like), dtype=torch.float32) for _ in range(2))
        return StepScores(loss_M, like.new_empty(len(like), dtype=torch.bool), acceptance_M)

    def of(self, number_M: Tensor) -> StepScores:
        """Of some of the predictions."""
        return StepScores(*(x[number_M] for x in _fields(self)))


class Gradients:
    """Gradients of the steps' hidden states, where they need some, and of the heads' parameters."""

    def __init__(self, hidden: Sequence[Tensor]) -> None:
        self.hidden = hidden
        self.of_hidden = {h: torch.zeros_like(h) for h in dict.fromkeys(hidden) if h.requires_grad}
        self.of_parameter: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def add(self, piece: Sequence[PredictionPart], input_CH: Tensor, logits: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Add the gradients, where the head made these logits of these predictions. grads: of the logits."""
        # A head is mostly one linear map. Autograd would make a [V, H] gradient for each chunk and add it to the last one; here
        # one is made and added to in place. Autograd's nodes can only be told by the names of their classes: one that a later
        # torch calls otherwise takes the general way below, which costs memory and is never wrong.
        if len(logits) == 1 and _is_product(logits[0]):
            product: Any = logits[0].grad_fn
            self._add_product(product, grads[0])
            if product.next_functions[0][0] is None:  # its input needs no gradient
                return
            logits, grads = [product._saved_self], [grads[0] @ product._saved_mat2.t()]
        parameters = [leaf for leaf in leaves(*logits) if leaf is not input_CH]
        grad_inputs = ([input_CH] if input_CH.requires_grad else []) + parameters
        if not grad_inputs:
            return
        gradients = list(torch.autograd.grad(logits, grad_inputs, grads, allow_unused=True))
        to_input_CH = gradients.pop(0) if input_CH.requires_grad else None
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None and parameter in self.of_parameter:
                self.of_parameter[parameter].add_(gradient)
            elif gradient is not None:
                self.of_parameter[parameter] = gradient
        if to_input_CH is None:
            return
        if piece[0].rows is not None:
            self.of_hidden[self.hidden[piece[0].step]][piece[0].rows.row_N] += to_input_CH
            return
        for segment, gradient_CH in zip(piece, to_input_CH.split([segment.count for segment in piece]), strict=True):
            hidden_grad_MH = self.of_hidden.get(self.hidden[segment.step])
            if hidden_grad_MH is not None:
                hidden_grad_MH[segment.row_C] += gradient_CH  # other steps may read the same states

    def _add_product(self, product: Any, grad_logits_CD: Tensor) -> None:
        """Add the gradient of a product's parameter; only the first chunk's has a tensor of its own."""
        parameter, input_CH = product.next_functions[1][0].next_functions[0][0].variable, product._saved_self
        if parameter in self.of_parameter:
            self.of_parameter[parameter].addmm_(grad_logits_CD.t(), input_CH)
        else:
            self.of_parameter[parameter] = grad_logits_CD.t() @ input_CH

    def attach(self, total: Tensor) -> Tensor:
        """The same number, from which these gradients flow."""
        grad_items = [*self.of_hidden.items(), *self.of_parameter.items()]
        out: Tensor = _Attached.apply(total, [grad for _, grad in grad_items], *(tensor for tensor, _ in grad_items))
        return out


def _is_product(logits_CD: Tensor) -> bool:
    """Whether the logits are the product of a tensor with a parameter's transpose, as from a linear map without bias."""
    product: Any = logits_CD.grad_fn
    if type(product).__name__ != "MmBackward0":
        return False
    transposed = product.next_functions[1][0]
    return type(transposed).__name__ == "TBackward0" and _is_leaf(transposed.next_functions[0][0])


def _is_leaf(node: Any) -> bool:
    return type(node).__name__ == "AccumulateGrad"


def leaves(*roots: Tensor) -> list[Tensor]:
    """The tensors without history that need a gradient of these, in the order of their graph."""
    leaf_tensors, visited, stack = list[Tensor](), set[Any](), list[Any]([root.grad_fn for root in roots])
    while stack:
        node = stack.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if _is_leaf(node):
            leaf_tensors.append(node.variable)
        stack += [next_node for next_node, _ in node.next_functions]
    return leaf_tensors


class Scoring:
    """Scores the predictions of one batch against the target's distribution, at most `at_once` of them at a time.

    steps: what is scored: the predictions as they are, and those of each shared head joined (`objective/scores.py`).
    """

    def __init__(
        self,
        predictions: Sequence[Prediction],
        batch: TrainBatch,
        distribution: Distribution,
        terms: Terms,
        at_once: int,
        end_to_end: bool = False,
        divided: bool = False,
    ) -> None:
        """terms, end_to_end: as for `scores_of`. divided: ZeRO-3 divides the heads' parameters."""
        self.distribution, self.terms, self.end_to_end = distribution, terms, end_to_end
        token_P = batch.token_BT.flatten()
        self.steps = [p for p in predictions if p.shared is None]
        teacher_index_M = [batch.teacher_index(batch.on_host(p.label_M)) for p in self.steps]
        heads: list[Hashable] = [(p.head, p.offers) for p in self.steps]
        self.chunks = list(chunks(teacher_index_M, heads, at_once, token_P.device))
        joined_steps, first, step_numbers = shared_steps(predictions, batch), dict[Hashable, int](), iter(range(len(heads)))
        for head, head_steps in joined_steps.items():
            first[head] = len(heads)
            self.chunks += head_steps.chunks(first[head], at_once, token_P.device)
            self.steps += head_steps.kinds
            heads += [head] * len(head_steps.kinds)
        self.labels = [token_P[p.label_M] for p in self.steps]
        self._scored_in = [
            (next(step_numbers), None) if p is None else (first[p.head] + p.kind, joined_steps[p.head].number_M(p.column))
            for p in (prediction.shared for prediction in predictions)
        ]
        if divided:
            self.chunks = alike(self.chunks, heads, token_P.device, joined_steps)

    @property
    def hidden(self) -> list[Tensor]:
        return [step.hidden_MH for step in self.steps]

    def plain(self) -> list[StepScores]:
        """Scores of every step, without gradients."""
        return self._apart(self.run(None, None))

    def weighted(self) -> tuple[list[StepScores], Gradients]:
        """Scores of every step, and the gradients of the sum of the predictions' weights times their losses."""
        weights = [_by_row(p.weight, label_M) for p, label_M in zip(self.steps, self.labels, strict=True)]
        gradients = Gradients(self.hidden)
        return self._apart(self.run(weights if torch.is_grad_enabled() else None, gradients)), gradients

    def differentiable(self) -> list[StepScores]:
        """Scores of every step, whose losses have gradients, for weights that depend on the losses."""
        head_parameters, scores = dict[Tensor, None](), [StepScores.empty(label_M) for label_M in self.labels]
        scores = self.run(None, None, head_parameters)
        inputs = [h for h in dict.fromkeys(self.hidden) if h.requires_grad] + list(head_parameters)
        loss_R: Tensor = _Later.apply(self, joined([step.loss_M for step in scores]), *inputs)
        losses = loss_R.split([len(label_M) for label_M in self.labels])
        return self._apart([StepScores(loss_M, s.top1_M, s.acceptance_M) for loss_M, s in zip(losses, scores, strict=True)])

    def recomputed(self) -> list[StepScores]:
        """As `differentiable`, by torch's graph: the backward pass computes each piece again (arXiv 1604.06174), and the
        target's logits for each of them. For parameters that DeepSpeed's ZeRO-3 has divided: only their modules gather them."""
        scored_segments: list[list[tuple[Tensor, ...]]] = [[] for _ in self.steps]
        for chunk in self.chunks:
            with torch.no_grad():
                cached_target = [self.distribution.at(chunk.position_U)]
            score = partial(self._scores, chunk, cached_target)
            for piece in chunk.pieces:
                input_CH = self._input(piece)
                scored_C = checkpoint(score, piece, input_CH, use_reentrant=False)
                rows = [index_tensor(segment.row_C, input_CH.device) for segment in piece]
                split = (x.split([segment.count for segment in piece]) for x in scored_C)
                for segment, *segment_scores in zip(piece, rows, *split, strict=True):
                    scored_segments[segment.step].append(tuple(segment_scores))
            cached_target.clear()
        return self._apart([_in_order(segments) for segments in scored_segments])

    def _scores(
        self, chunk: LossChunk, cached_target: Sequence[Rows], piece: Sequence[PredictionPart], input_CH: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(loss_C, top1_C, acceptance_C). cached_target: the target's logits, where they are still in memory."""
        first, group_scores = self.steps[piece[0].step], []
        for segments, logits_CD in self._logits(piece, input_CH):
            label_C = joined([self.labels[segment.step][segment.row_C] for segment in segments])
            with torch.no_grad():
                target = cached_target[0] if cached_target else self.distribution.at(chunk.position_U)
                rows = target(joined_index([segment.place_C for segment in segments], label_C.device), first, logits_CD)
            group_scores.append(scores_of(first, logits_CD, rows, label_C, self.terms, self.end_to_end))
        loss_C, top1_C, acceptance_C = (joined(column) for column in zip(*group_scores, strict=True))
        return loss_C, top1_C, acceptance_C

    def _apart(self, scores: Sequence[StepScores]) -> list[StepScores]:
        """The scores of each of the given predictions. scores: of `steps`."""
        return [scores[step] if number_M is None else scores[step].of(number_M) for step, number_M in self._scored_in]

    def _input(self, piece: Sequence[PredictionPart]) -> Tensor:
        """The head's input for a piece."""
        if (rows := piece[0].rows) is not None:
            return self.steps[piece[0].step].hidden_MH[rows.row_N]
        return joined([self.steps[segment.step].hidden_MH[segment.row_C] for segment in piece])

    def _logits(self, piece: Sequence[PredictionPart], input_CH: Tensor) -> list[tuple[Sequence[PredictionPart], Tensor]]:
        """The logits of a piece's predictions: of all parts together, or by kind where the head is shared."""
        first, rows = self.steps[piece[0].step], piece[0].rows
        if first.shared is None or rows is None:
            return [(piece, first.head(input_CH))]
        logits_by_kind = (logits_NJD.flatten(0, 1) for logits_NJD in first.shared.head(input_CH, rows.row_N))
        return [
            ([segment], x if rows.entry_C is None else x[rows.entry_C])
            for segment, x in zip(piece, logits_by_kind, strict=True)
        ]

    def run(
        self, weights: Sequence[Tensor] | None, gradients: Gradients | None, found: dict[Tensor, None] | None = None
    ) -> list[StepScores]:
        """Scores of every step. weights: of each prediction; None: add no gradients. found: receives the heads' parameters."""
        scores = [StepScores.empty(label_M) for label_M in self.labels]
        for chunk in self.chunks:
            with torch.no_grad():
                target = self.distribution.at(chunk.position_U)
            for piece in chunk.pieces:
                self._piece(piece, target, scores, weights, gradients, found)
        return scores

    def _piece(
        self,
        piece: Sequence[PredictionPart],
        target: Rows,
        scores: Sequence[StepScores],
        weights: Sequence[Tensor] | None,
        gradients: Gradients | None,
        head_parameters: dict[Tensor, None] | None,
    ) -> None:
        with torch.no_grad():
            input_CH = self._input(piece)
        input_CH.requires_grad_(any(self.steps[segment.step].hidden_MH.requires_grad for segment in piece))
        grads = list[tuple[Tensor, Tensor]]()
        with torch.set_grad_enabled(weights is not None or head_parameters is not None):
            groups = self._logits(piece, input_CH)
            if head_parameters is not None:
                head_parameters |= dict.fromkeys(leaf for leaf in leaves(*(x for _, x in groups)) if leaf is not input_CH)
                groups = [(segments, logits_CD.detach()) for segments, logits_CD in groups]
            for segments, logits_CD in groups:
                grad_logits_CD = self._score(segments, logits_CD, target, scores, weights)
                grads += [] if grad_logits_CD is None else [(logits_CD, grad_logits_CD)]
        if grads and gradients is not None:
            gradients.add(piece, input_CH, *zip(*grads, strict=True))

    def _score(
        self,
        segments: Sequence[PredictionPart],
        logits_CD: Tensor,
        target: Rows,
        scores: Sequence[StepScores],
        weights: Sequence[Tensor] | None,
    ) -> Tensor | None:
        """Score these logits. Returns the gradient of the weighted losses, where one is wanted."""
        first = self.steps[segments[0].step]
        label_C = joined([self.labels[segment.step][segment.row_C] for segment in segments])
        with torch.no_grad():
            rows = target(joined_index([segment.place_C for segment in segments], label_C.device), first, logits_CD)
        leaf_logits_CD = logits_CD.detach().requires_grad_(logits_CD.requires_grad)
        inplace = type(logits_CD.grad_fn).__name__ in KEEP_NO_OUTPUT  # the loss's gradient may overwrite the logits
        weight_C = None if weights is None else joined([weights[segment.step][segment.row_C] for segment in segments]).float()
        scored_C = scores_of(first, leaf_logits_CD, rows, label_C, self.terms, self.end_to_end, inplace, weight_C)
        for step_fields, field_C in zip(
            zip(*(_fields(scores[segment.step]) for segment in segments), strict=True), scored_C, strict=True
        ):
            for segment, field_M, segment_C in zip(
                segments, step_fields, field_C.detach().split([p.count for p in segments]), strict=True
            ):
                field_M[segment.row_C] = segment_C
        if weight_C is None or not logits_CD.requires_grad:
            return None
        (grad_logits_CD,) = torch.autograd.grad(scored_C[0], leaf_logits_CD, weight_C)
        return grad_logits_CD.detach()


def _in_order(segment_scores: Sequence[tuple[Tensor, ...]]) -> StepScores:
    """The scores of one step from (rows, loss, hit, mass) of its parts."""
    row_M, loss_M, top1_M, acceptance_M = (torch.cat(column) for column in zip(*segment_scores, strict=True))
    return StepScores(*(torch.zeros_like(x).index_copy(0, row_M, x) for x in (loss_M, top1_M, acceptance_M)))


def _fields(step: StepScores) -> tuple[Tensor, Tensor, Tensor]:
    return step.loss_M, step.top1_M, step.acceptance_M


def _by_row(weight: float | Tensor, like_M: Tensor) -> Tensor:
    if isinstance(weight, Tensor):
        return weight
    return like_M.new_full((len(like_M),), weight, dtype=torch.float32)


class _Attached(torch.autograd.Function):
    """A number with gradients that are already known."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, gradients: list[Tensor], *inputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return total.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the loss's gradients were taken already, and were scaled in place; compute the loss again")
        return grads[0], None, *(gradient.mul_(grads[0]) for gradient in gradients)


class _Later(torch.autograd.Function):
    """Losses whose gradients are computed in the backward pass, which brings their weights."""

    @staticmethod
    def forward(ctx: Any, scoring: Scoring, loss_R: Tensor, *inputs: Tensor) -> Tensor:
        ctx.scoring, ctx.inputs = scoring, inputs
        return loss_R.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        scoring: Scoring = ctx.scoring
        gradients = Gradients(scoring.hidden)
        scoring.run(grads[0].split([len(label_M) for label_M in scoring.labels]), gradients)
        hidden = list(gradients.of_hidden.values())
        return None, None, *hidden, *(gradients.of_parameter.get(p) for p in ctx.inputs[len(hidden) :])
