"""Many random requests over few slots and scarce pages: every text equals plain decoding's, and no page or slot is lost."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tests.faults.campaign import UNCHANGED, TryResult, broken, failed
from tests.faults.child import forked

if TYPE_CHECKING:
    from drafttrain.core.sampling import Sampling
    from drafttrain.decoding.request import Request, Result
    from drafttrain.decoding.scheduler import Session
    from drafttrain.model.drafter import Drafter
    from drafttrain.targets.hf import HFTarget

SLOTS, LONGEST = 5, 96  # of a prompt with its new tokens
VOCAB = 64
APART = 10  # keys of two requests: each sample has one
TIE = 1e-6  # of a number and of the end of a token's share, which rounding can move by so much


class Storm:
    """A try is one storm of requests in a child, for a family or for plain decoding."""

    name = "storm"

    def prepare(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)

    def attempt(self, draw: random.Random, folder: Path) -> list[TryResult]:
        from tests.tiny import NAMES

        family, count, seed = draw.choice([None, *NAMES]), draw.randint(5, 40), draw.randrange(10**6)
        every, kind = draw.choice([None, None, 1, 2, 3]), draw.choice(["fast", "hf"])
        noise = draw.choice([0.0, 0.3, 1.0])
        what = family or "plain decoding"
        command = f"{count} requests, seed {seed}, read_every {every}, {kind} runner, noise {noise}"

        def work() -> int:
            target = tiny_target(kind)
            from tests.tiny import build

            storm(target, None if family is None else build(family, target, noise), count, seed, every)
            return 0

        ended = forked(work, folder, folder / "said").wait(300)
        fault = broken(ended) or (None if ended.code == 0 else f"exit code {ended.code}")
        if fault:
            return [failed(what, "every text is plain decoding's, and nothing is lost", fault, command, ended)]
        return [TryResult(what, UNCHANGED, command=command, count=count)]


def tiny_target(kind: str) -> HFTarget:
    """A random Llama of four blocks, with weights large enough that its greedy text is no constant."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from drafttrain.targets.fast import FastTarget
    from drafttrain.targets.hf import HFTarget

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.copy_(torch.randn(parameter.shape) * 1.2 / parameter.shape[1] ** 0.5)
    return (FastTarget if kind == "fast" else HFTarget)(model)


def requests(count: int, seed: int) -> list[Request]:
    """Prompts from one token to the limit, one to four samples; many end at once or at a stop token."""
    from drafttrain.decoding.request import Request

    draw, found = random.Random(seed), []
    for number in range(count):
        length = draw.choice([1, 2, 31, 32, 33, draw.randint(1, LONGEST - 1), LONGEST - 1])
        new = min(draw.choice([1, 1, 2, draw.randint(1, 30)]), LONGEST - length)
        prompt = [draw.randrange(VOCAB) for _ in range(length)]
        stop = frozenset(draw.sample(range(VOCAB), draw.choice([0, 0, 3, 12])))
        least = draw.randint(0, new) if stop else 0
        found.append(Request(prompt, APART * number, new, least, stop, samples=draw.choice([1, 1, 1, 2, 3, 4])))
    return found


def served(session: Session, asked: Sequence[Request], draw: random.Random) -> list[Result]:
    """Submit the requests a few at a time, between steps."""
    results: list[Result] = []
    waiting = list(asked)
    while waiting or session.busy:
        for _ in range(draw.choice([0, 1, 6])):
            if waiting:
                results += session.submit(waiting.pop(0))
        session.step()
    return results


def tied(target: HFTarget, sampling: Sampling, result: Result, tokens: list[int], prompt: Sequence[int]) -> bool:
    """Whether the texts part where the number that samples the token is, in float64, at the end of a token's share."""
    import torch

    from drafttrain.core.sampling import Lane, distribution, uniform

    pairs = zip(result.tokens, tokens, strict=False)
    if (same := next((i for i, (own, other) in enumerate(pairs) if own != other), None)) is None:
        return False
    text = torch.tensor([[*prompt, *tokens[:same]]])
    with torch.no_grad():
        logits_V = copy.deepcopy(target.model).double()(text, use_cache=False).logits[0, -1]
    end_V = distribution(logits_V, sampling).double().cumsum(-1)
    keyed = replace(sampling, key_B=torch.tensor([result.request]))
    number = uniform(keyed, torch.tensor([text.shape[1]]), Lane.TARGET).double()
    return bool((end_V - number).abs().min() < TIE)


def storm(target: HFTarget, drafter: Drafter | None, count: int, seed: int, every: int | None) -> None:
    """Run with as few pages as the largest request needs, with some more, and with enough. every: as `Controls.read_every`."""
    from drafttrain.core.sampling import Sampling
    from drafttrain.decoding.scheduler import Decoder, Session
    from drafttrain.decoding.settings import Controls
    from drafttrain.model.kv_storage import PAGE, pages_for

    asked, draw, sampling = requests(count, seed), random.Random(seed), Sampling(0.9, seed=5)
    plain = Session(Decoder(target, None, "coupled", sampling), SLOTS, LONGEST + 1)
    wanted = [result.tokens for result in served(plain, asked, draw)]
    decoder = Decoder(target, drafter, "coupled", sampling, controls=Controls(read_every=every))
    room = LONGEST + decoder.scratch
    least = max(r.samples * pages_for(decoder.positions(r)) - (r.samples - 1) * (len(r.prompt) // PAGE) for r in asked)
    for pages in (least, least + draw.randint(1, 8), SLOTS * pages_for(room)):
        session = Session(decoder, SLOTS, room, pages)
        found = served(session, asked, draw)
        for result, tokens in zip(found, wanted, strict=True):
            assert result.tokens == tokens or tied(target, sampling, result, tokens, asked[result.request // APART].prompt)
        assert session.kv.free_pages == session.kv.pages == pages and sorted(session.free) == list(range(SLOTS))
        assert not session.active and set(session.kv.storage.uses) == {0}
