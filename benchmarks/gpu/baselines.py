"""The same plain step in transformers, interleaved with ours: `generate`, and its static cache compiled by torch.

Batch 1, greedy, with one model object and one set of weights for all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StaticCache, StoppingCriteria, StoppingCriteriaList

from benchmarks.gpu.machine import WARM, Machine, race
from benchmarks.gpu.steps import Setting, Shared, Station, target_of
from benchmarks.gpu.suite import Job
from drafttrain.measure.bench import generation_config_of

NEW = 16  # tokens of one timed run
REPEATS = 5
ROOM = 512  # positions beyond the context for the compiled loop: it is never set back


class _Second(StoppingCriteria):
    """A criterion that stops nothing. At the first token after the prompt it waits for the device and records an event."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.began: torch.cuda.Event | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:
        if self.began is None and not self.machine.rehearsal:
            self.machine.wait()
            self.began = torch.cuda.Event(enable_timing=True)
            self.began.record()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def generating(model: Any, prompt_1T: Tensor, machine: Machine) -> Callable[[], float]:
    """Seconds per token of `generate` after the prompt."""
    config = GenerationConfig(max_new_tokens=NEW + 1, do_sample=False, pad_token_id=0, eos_token_id=None)

    @torch.inference_mode()
    def run() -> float:
        watch = _Second(machine)
        criteria = StoppingCriteriaList([watch])
        seen_1T = torch.ones_like(prompt_1T)
        with generation_config_of(model, config):  # no end token, whatever the model's own says
            model.generate(prompt_1T, attention_mask=seen_1T, generation_config=config, stopping_criteria=criteria)
        if watch.began is None:
            return 1.0
        ended = torch.cuda.Event(enable_timing=True)
        ended.record()
        ended.synchronize()
        return watch.began.elapsed_time(ended) / 1000 / NEW

    return run


def compiled(model: Any, prompt_1T: Tensor, machine: Machine) -> Callable[[], float]:
    """Seconds per token of a greedy loop over a static cache, with its step compiled in mode reduce-overhead."""
    cache = StaticCache(config=model.config, max_cache_len=prompt_1T.shape[1] + ROOM)
    how: dict[str, Any] = {"backend": "eager"} if machine.rehearsal else {"mode": "reduce-overhead"}

    def step(token_11: Tensor) -> Tensor:
        out = model(input_ids=token_11, past_key_values=cache, use_cache=True)
        return out.logits[:, -1].argmax(-1, keepdim=True)

    with torch.no_grad():
        out = model(input_ids=prompt_1T, past_key_values=cache, use_cache=True, logits_to_keep=1)
    token, faster = [out.logits[:, -1].argmax(-1, keepdim=True)], torch.compile(step, **how)

    @torch.no_grad()
    def loop() -> None:
        for _ in range(NEW):
            if not machine.rehearsal:
                torch.compiler.cudagraph_mark_step_begin()
            token[0] = faster(token[0]).clone()  # the next replay overwrites the graph's own output

    for _ in range(2):
        loop()
    return lambda: machine.seconds(loop) / NEW


MAKERS = {"generate": generating, "compiled loop": compiled}


def measure(model: str, context: int, other: str, machine: Machine) -> dict[str, Any]:
    target = target_of(model, machine)
    assert (2 + WARM + REPEATS) * NEW < ROOM
    blocks: Any = target.model.base_model.layers
    for layer in blocks:
        layer._forward_hooks.clear()  # remove the taps of our runner, which would slow the other side down
    prompt_1T = torch.randint(target.shape.vocab_size, (1, context), device=machine.device)
    ours = Station(Shared(target), Setting(model, 1, context), 1, machine)
    theirs = MAKERS[other](target.model, prompt_1T, machine)
    taken = race({"ours": ours.seconds, "theirs": theirs}, REPEATS)
    return {f"{name}_ms": 1e3 * seconds for name, seconds in taken.items()}


def jobs(model: str, context: int, machine: Machine) -> list[Job]:
    return [
        Job(
            f"{other} {model} context={context}",
            f"against {other}",
            "decoder",
            partial(measure, model, context, other, machine),
        )
        for other in MAKERS
    ]
