"""Logits processors at every node of a tree: logit bias, penalties by the request's own text, minimum length.

Shapes: S slots, B active rows, N nodes (root included), A new tokens, K stop tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from drafttrain.core.sampling import Sampling
from drafttrain.decoding.request import Request
from drafttrain.model.images import with_placeholders


class StopTokens:
    """The stop tokens of each slot's request, on the device.

    The table is replaced only if a request has more stop tokens than any before it. Captured steps read the table that existed
    at capture, so `most` is part of their key.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self.token_SK = torch.full((slots, 1), -1, device=device)  # -1: none

    def put(self, slot: int, ids: Collection[int]) -> None:
        """A request with these stop tokens takes the slot."""
        if len(ids) > self.most:
            self.token_SK = torch.nn.functional.pad(self.token_SK, (0, len(ids) - self.most), value=-1)
        self.token_SK[slot] = -1
        if ids:
            self.token_SK[slot, : len(ids)] = torch.tensor(sorted(ids), device=self.token_SK.device)

    @property
    def most(self) -> int:
        """Columns of the table, at least 1."""
        return self.token_SK.shape[1]


class LogitsProcessors:
    """Logit bias, penalties and minimum length, per slot. They do nothing if no request asks for them.

    Bias and penalties are added in the order of transformers and vLLM. The repetition penalty counts the prompt too, the others
    the output alone, as vLLM and SGLang do. All data is on the device and nothing syncs with the host: a CUDA graph can hold
    `add` and the call.
    """

    def __init__(
        self, slots: int, vocab: int, sampling: Sampling, device: torch.device, placeholder: int | None = None
    ) -> None:
        """placeholder: the token that counts as seen where a prompt has an image."""
        self._placeholder = placeholder
        self._sampling, self._device = sampling, device
        self.bias_V: Tensor | None = None
        if sampling.logit_bias:
            self.bias_V = torch.zeros(vocab, device=device)
            biases = [float(bias) for bias in sampling.logit_bias.values()]
            self.bias_V[torch.tensor([*sampling.logit_bias])] = torch.tensor(biases, device=device)
        self.seen_SV: Tensor | None = None
        self.made_SV: Tensor | None = None  # float32, how often the output has the token
        if sampling.repetition_penalty != 1.0:
            self.seen_SV = torch.zeros(slots, vocab, dtype=torch.bool, device=device)
        if sampling.presence_penalty or sampling.frequency_penalty:
            self.made_SV = torch.zeros(slots, vocab, device=device)
        self._seen_1 = torch.ones(1, dtype=torch.bool, device=device)  # what `add` writes: a graph takes no number of the host
        self._least_S = torch.zeros(slots, dtype=torch.long, device=device)  # tokens before which stop tokens are barred
        self._stop = StopTokens(slots, device)
        self._barring: set[int] = set()

    def enter(self, slot: int, request: Request) -> None:
        """A request takes the slot."""
        self._barring.discard(slot)
        self._least_S[slot] = request.min_new_tokens
        if request.min_new_tokens and request.stop_ids:
            self._barring.add(slot)
            self._stop.put(slot, request.stop_ids)
        self.see(slot, request.prompt)

    def see(self, slot: int, prompt: Sequence[int], output: Sequence[int] = ()) -> None:
        """Set the slot's text."""
        if self.seen_SV is not None:
            self.seen_SV[slot] = False
            text = [*(prompt if self._placeholder is None else with_placeholders(prompt, self._placeholder)), *output]
            self.seen_SV[slot, torch.tensor(text, device=self._device)] = True
        if self.made_SV is not None:
            token_T = torch.tensor(output, dtype=torch.long, device=self._device)
            self.made_SV[slot] = torch.bincount(token_T, minlength=self.made_SV.shape[1]).float()

    def add(self, slot_B: Tensor, root_B: Tensor, token_BA: Tensor, count_B: Tensor) -> None:
        """Append the first count_B tokens of each row to its text. The root is in the text already."""
        if self.seen_SV is None and self.made_SV is None:
            return
        valid_BA = torch.arange(token_BA.shape[1], device=token_BA.device) < count_B[:, None]
        text_BA = torch.where(valid_BA, token_BA, root_B[:, None])
        if self.seen_SV is not None:
            self.seen_SV.index_put_((slot_B[:, None], text_BA), self._seen_1)
        if self.made_SV is not None:
            place_BA = slot_B[:, None] * self.made_SV.shape[1] + text_BA
            self.made_SV.view(-1).scatter_add_(0, place_BA.flatten(), valid_BA.float().flatten())

    def __call__(self, logits_BNV: Tensor, token_BN: Tensor, ancestor_BNN: Tensor, slot_B: Tensor, made_B: Tensor) -> Tensor:
        """The processed logits. made_B: new tokens of each row's text so far, the root included.

        A node counts the text and the drafts on its own path as text.
        """
        if self._sampling.penalised:
            logits_BNV = logits_BNV.float()  # as transformers does: half precision would round small penalties away
        if self.bias_V is not None:
            logits_BNV = logits_BNV + self.bias_V.to(logits_BNV.dtype)
        path_BNN = torch.where(ancestor_BNN, token_BN[:, None], token_BN[:, :1, None])
        if self.seen_SV is not None:
            seen_BNV = self.seen_SV[slot_B][:, None].repeat(1, token_BN.shape[1], 1).scatter_(2, path_BNN, True)
            penalty = self._sampling.repetition_penalty
            # a seen token becomes less likely whatever the sign of its logit (arXiv 1909.05858, as transformers does it)
            lowered_BNV = torch.where(logits_BNV < 0, logits_BNV * penalty, logits_BNV / penalty)
            logits_BNV = torch.where(seen_BNV, lowered_BNV, logits_BNV)
        if self.made_SV is not None:
            drafts_BNN = ancestor_BNN[..., 1:].float()  # the root is counted already
            made_BNV = (
                self.made_SV[slot_B][:, None].repeat(1, token_BN.shape[1], 1).scatter_add_(2, path_BNN[..., 1:], drafts_BNN)
            )
            lowered_by_BNV = self._sampling.frequency_penalty * made_BNV + self._sampling.presence_penalty * (made_BNV > 0)
            logits_BNV = logits_BNV - lowered_by_BNV.to(logits_BNV.dtype)
        if self._barring:
            generated_BN = made_B[:, None] + ancestor_BNN.sum(-1) - 1
            stop_BK = self._stop.token_SK[slot_B]
            early_BNK = (generated_BN < self._least_S[slot_B][:, None])[..., None] & (stop_BK >= 0)[:, None]
            stop_index_BNK = stop_BK.clamp_min(0)[:, None].expand(early_BNK.shape)
            barred_BNV = torch.zeros_like(logits_BNV, dtype=torch.long).scatter_add_(2, stop_index_BNK, early_BNK.long())
            logits_BNV = logits_BNV.masked_fill(barred_BNV > 0, -torch.inf)
        return logits_BNV

    @property
    def kind(self) -> tuple[bool, int]:
        """Which processors are active. Steps of different kinds run different operations."""
        return self._sampling.penalised, self._stop.most if self._barring else 0

    @property
    def idle(self) -> bool:
        return self.kind == (False, 0)


def logits_after(
    logits_V: Tensor, sampling: Sampling, prompt: Sequence[int], output: Sequence[int], placeholder: int | None = None
) -> Tensor:
    """[V] the processed logits behind a text, whose request asks for no minimum length."""
    processors = LogitsProcessors(1, len(logits_V), sampling, logits_V.device, placeholder)
    processors.see(0, prompt, output)
    slot_1 = torch.zeros(1, dtype=torch.long, device=logits_V.device)
    token_11, ancestor_111 = slot_1[None] + [*prompt, *output][-1], torch.ones_like(slot_1, dtype=torch.bool)[None, None]
    return processors(logits_V[None, None], token_11, ancestor_111, slot_1, slot_1)[0, 0]
