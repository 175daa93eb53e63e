"""The speculators library's own model on an exported drafter. drafttrain/engines/process.py explains the form of job and
result.

The library trains and does not serve. So transformers gives the target's greedy output, and one teacher-forced pass of the
library's drafter over it gives the drafts of every position: while a chain is right, its drafts are the output.

Shapes: T positions of prompt and output, K drafts, D ids of the drafter's vocabulary.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import torch


@torch.no_grad()
def decoded(job: dict[str, Any]) -> dict[str, Any]:
    """Decode every prompt of a job."""
    from speculators import SpeculatorModel
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(job["target"], dtype=torch.float32).eval()
    drafter = SpeculatorModel.from_pretrained(job["drafter"], dtype=torch.float32).eval()
    drafter.load_verifier_weights()
    use_dense_attention(drafter)
    outputs, steps = [], []
    for prompt in job["prompts"]:
        text = greedy(target, prompt, job["max_new_tokens"] + job["draft_length"] + 1)
        reached = accepted_at(target, drafter, prompt + text, job["draft_length"])
        end = next((i + 1 for i, token in enumerate(text) if token in job["stop_ids"]), len(text))
        end = min(end, job["max_new_tokens"])
        outputs.append(text[:end])
        steps.append(walked(reached, len(prompt), end))
    step_counts = [accepted for text in steps for accepted in text]
    return {
        "engine": "speculators",
        "versions": {name: version(name) for name in ("speculators", "torch", "transformers")},
        "outputs": outputs,
        "accepted": sum(step_counts),
        "drafted": len(step_counts) * job["draft_length"],
        "accepted_by_position": [sum(accepted > i for accepted in step_counts) for i in range(job["draft_length"])],
        "prompts": [{"accepted": sum(text), "drafted": len(text) * job["draft_length"]} for text in steps],
        "begins": "plain",
        "ends": "whole",
        "notes": [],
    }


def use_dense_attention(drafter: Any) -> None:
    """Use dense attention, because the flexible one needs a compiler."""
    from speculators.models.attention import create_float_mask

    drafter.config.transformer_layer_config._attn_implementation = "eager"
    drafter._attn_impl, drafter._create_mask_fn = "eager", create_float_mask


def greedy(target: Any, prompt: list[int], count: int) -> list[int]:
    """So many greedy tokens, past stop tokens too."""
    ids, cache, text = torch.tensor([prompt]), None, list[int]()
    while len(text) < count:
        output = target(ids, past_key_values=cache, use_cache=True)
        cache, ids = output.past_key_values, output.logits[:, -1:].argmax(-1)
        text.append(int(ids))
    return text


def accepted_at(target: Any, drafter: Any, tokens: list[int], drafts: int) -> list[int]:
    """For each position t: the number of drafts in a row that are right with token t as the root. The last K + 1 are
    undefined.
    """
    states = target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    fused_TH = torch.cat([states[k] for k in drafter.config.eagle_aux_hidden_state_layer_ids], -1)[:, :-1]
    next_T = torch.tensor([tokens[1:]])  # the state of position t goes with token t + 1, the root
    draft_ids = drafter(fused_TH, next_T, torch.zeros_like(next_T), ttt_steps=drafts)
    ids_D = torch.arange(drafter.draft_vocab_size) + (0 if drafter.d2t is None else drafter.d2t)
    reached = [0]
    for i in range(len(tokens) - 1):
        hits = 0
        while hits < drafts and i + 2 + hits < len(tokens) and int(ids_D[draft_ids[hits][0, i]]) == tokens[i + 2 + hits]:
            hits += 1
        reached.append(hits)
    return reached


def walked(reached: list[int], prompt: int, end: int) -> list[int]:
    """Accepted drafts of each decode step. The first root is the output's first token."""
    position, counts = 1, list[int]()
    while position < end:
        counts.append(reached[prompt + position - 1])
        position += counts[-1] + 1
    return counts
