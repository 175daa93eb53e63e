"""Tries on a GPU whether a CUDA graph can hold the passes of a target that transformers runs, and if not says why.

Shapes: B rows, N nodes, T prompt positions, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafttrain.decoding.graph_runner import CaptureError, captured_graph, warmed, why_waiting
from drafttrain.model.kv_cache import KVCache
from drafttrain.model.kv_storage import PAGE
from drafttrain.model.target import Taps
from drafttrain.targets.probe import PROMPTS, Probed, gap

NODES = 4
KEPT = (3, 1)  # accepted nodes of each row


class ProbePasses:
    """What a decode step does with the target: it verifies nodes, commits some of them, and verifies one after them."""

    def __init__(self, target: Probed) -> None:
        self.target, device, B, T = target, target.device, len(PROMPTS), max(PROMPTS)
        self.draw, self.vocab = torch.Generator().manual_seed(0), target.shape.vocab_size
        self.column_BT = torch.arange(T, device=device).expand(B, T)
        self.slot_B, self.kept_B = torch.arange(B, device=device), torch.tensor(KEPT, device=device)
        self.chain_BNN = torch.ones(NODES, NODES, dtype=torch.bool, device=device).tril().expand(B, -1, -1)
        self.kv: KVCache = target.new_cache(B, PAGE)
        target(self.tokens(T), self.kv, None, self.column_BT, Taps(), self.column_BT[:, :0])
        self.kv.extend(PROMPTS)
        self.kv.use_static_length(PAGE - NODES, NODES)
        self.token_BN = self.tokens(NODES)

    def tokens(self, count: int) -> Tensor:
        """[B, count] random ones."""
        return torch.randint(0, self.vocab, (len(PROMPTS), count), generator=self.draw).to(self.target.device)

    def __call__(self) -> Tensor:
        """[B, N + 1, V] logits. The cache is afterwards as it was."""
        kv, target, column_BN = self.kv, self.target, self.column_BT[:, :NODES]
        kv.rows(self.slot_B)
        mark = kv.mark()
        node_logits = target(self.token_BN, kv, self.chain_BNN, kv.length_B[:, None] + column_BN, Taps()).logits_BRV
        kv.keep(column_BN, self.kept_B)
        next_logits = target(self.token_BN[:, :1], kv, self.chain_BNN[:, :1, :1], kv.length_B[:, None], Taps()).logits_BRV
        kv.back_to(mark)
        assert node_logits is not None and next_logits is not None
        return torch.cat([node_logits, next_logits], 1)


@torch.no_grad()
def why_not_captured(target: Probed) -> str | None:
    """Why no CUDA graph can hold decode steps of this target; None: one can, and its replay gives what a call gives.

    A pass that waits for the GPU is found before anything is captured.
    """
    passes = ProbePasses(target)
    output_BMV = torch.zeros_like(warmed(passes, target.device))
    if (reason := why_waiting(passes)) is not None:
        return reason
    try:
        graph = captured_graph(lambda: output_BMV.copy_(passes()), target.device)
    except CaptureError as error:
        return str(error)
    passes.token_BN.copy_(passes.tokens(NODES))  # a graph that holds values of its capture shows it now
    graph.replay()
    replayed_BMV, expected_BMV = output_BMV.clone(), passes()
    if not gap(target, replayed_BMV.flatten(), expected_BMV.flatten()) <= 1.0:
        return "a replayed graph gives other logits than a call"
    return None
