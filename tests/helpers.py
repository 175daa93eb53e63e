"""Tiny random models for tests."""

from __future__ import annotations

import copy
import multiprocessing
import random
import ssl
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from drafttrain.core.files import cache_home
from drafttrain.core.sampling import Sampling
from drafttrain.core.tree import DraftTree, TreeShape
from drafttrain.data import DataOptions
from drafttrain.data.sources import Conversation, read_usable
from drafttrain.decoding.scheduler import Decoder
from drafttrain.drafters import families
from drafttrain.features.online import Online
from drafttrain.model.batch import Prediction, TrainBatch
from drafttrain.model.drafter import Commit, Drafter, DraftState
from drafttrain.model.proposal import Proposal
from drafttrain.model.target import Taps
from drafttrain.targets.fast import FastTarget
from drafttrain.targets.hf import HFTarget
from drafttrain.targets.quantised import quantise

certificates = cache(ssl.create_default_context)  # which each client of httpx reads anew otherwise
VERDICTS: dict[tuple[str, int], tuple[str | None, int | None]] = {}  # of the probe, by model and seed: `tiny_target`
# a family of each kind: heads, recurrent, block, a model of its own, composed of others, nothing to learn
FEW = ("medusa", "eagle3", "dspark", "draft_model", "cascade", "prompt_lookup")
EACH = [x if x in FEW else pytest.param(x, marks=pytest.mark.slow) for x in sorted(families())]  # the others are slow
COMMON = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 512}
GATED = COMMON | {"num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 8}
ARCHITECTURES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**GATED),
    "mistral-sliding": MistralConfig(**GATED, sliding_window=6),
    "qwen2": Qwen2Config(**{k: v for k, v in GATED.items() if k != "head_dim"}),
    "qwen3": Qwen3Config(**GATED),
    "gemma3-sliding": Gemma3TextConfig(
        **GATED,
        sliding_window=6,
        query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "gpt2": GPT2Config(vocab_size=64, n_embd=32, n_layer=4, n_head=4, n_positions=512),
    "opt": OPTConfig(**COMMON, ffn_dim=48, word_embed_proj_dim=32),
    "phi": PhiConfig(**COMMON, intermediate_size=48),
    "falcon": FalconConfig(**{**COMMON, "new_decoder_architecture": False, "alibi": False}),
}


Made = TypeVar("Made")
EAGER = ("gemma2", "gpt-oss")  # transformers computes their scores in no other implementation


def tiny_model(name: str = "llama", seed: int = 0) -> torch.nn.Module:
    """A random model with weights large enough that its greedy text is no constant."""
    torch.manual_seed(seed)
    attention = "eager" if name in EAGER else "sdpa"
    model = AutoModelForCausalLM.from_config(copy.deepcopy(ARCHITECTURES[name]), attn_implementation=attention)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 1.2 / parameter.shape[1] ** 0.5)
    return model


def chosen(request: pytest.FixtureRequest, test: Callable[..., None], *names: str) -> list[tuple[Any, ...]]:
    """The values of these parameters for which this session runs the test: what a fixture of its module must provide."""
    items = (item for item in request.session.items if isinstance(item, pytest.Function) and item.function is test)
    return list(dict.fromkeys(tuple(item.callspec.params[name] for name in names) for item in items))


def tiny_target(name: str = "llama", seed: int = 0, stop: frozenset[int] = frozenset()) -> HFTarget:
    """A new target. What the probe says of these weights is asked once in a process: it is most of the time."""
    if (name, seed) not in VERDICTS:
        target = HFTarget(tiny_model(name, seed), stop)
        VERDICTS[name, seed] = target.chains_reason, target.wrong_tap
        return target
    chains_reason, wrong_tap = VERDICTS[name, seed]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("drafttrain.targets.hf.probe", lambda target: chains_reason)
        patch.setattr("drafttrain.targets.hf.wrong_tap", lambda target: wrong_tap)
        return HFTarget(tiny_model(name, seed), stop)


def quantised_target(
    kind: str, runner: type[HFTarget] = HFTarget, model: Any = None, stop_ids: frozenset[int] = frozenset()
) -> HFTarget:
    """A target with quantised weights. model: quantised in place; None: the tiny one."""
    model = tiny_model() if model is None else model
    fingerprint = quantise(model, kind, torch.device("cpu"))
    target = runner(model, stop_ids)
    target.fingerprint = fingerprint
    return target


@cache
def fast_target() -> FastTarget:
    """A target for tests that leave its weights and its code as they are: these share one in a process."""
    return FastTarget(tiny_model())


def prompts(count: int, vocab: int = 64, seed: int = 0, longest: int = 20) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]


class Scripted(Drafter):
    """Proposes what `guess` says: (text so far, root included, and the path's drafts) -> candidates, likeliest first.

    paths: rank paths, or depth for a chain. Knows its text from commits alone, as every drafter does.
    """

    def __init__(
        self,
        guess: Callable[[list[int]], list[int]],
        paths: Sequence[Sequence[int]],
        state: type[ScriptedState] | None = None,
    ) -> None:
        self.shape = TreeShape.of(paths)
        super().__init__(Proposal(self.shape.max_depth, self.shape.paths))
        self.guess, self.taps, self.state = guess, Taps(), state or ScriptedState

    def predict(self, batch: TrainBatch) -> Iterator[Prediction]:
        raise AssertionError("a scripted drafter is not trained")

    def open(self, slots: int, max_len: int) -> ScriptedState:
        return self.state(self, slots)


class ScriptedState(DraftState):
    def __init__(self, drafter: Scripted, slots: int) -> None:
        self.drafter = drafter
        self.text: list[list[int]] = [[] for _ in range(slots)]

    def reset(self, slot_R: torch.Tensor) -> None:
        for slot in slot_R.tolist():
            self.text[slot] = []

    def observe(self, commit: Commit, slot_B: torch.Tensor) -> None:
        for row, (slot, count) in enumerate(zip(slot_B.tolist(), commit.count_B.tolist(), strict=True)):
            if count:
                after, text = commit.next_BA[row, :count].tolist(), self.text[slot]
                self.text[slot] = text + after if text else [*commit.token_BA[row, :count].tolist(), after[-1]]

    def propose(self, slot_B: torch.Tensor, sampling: Sampling, depth: int | None = None) -> DraftTree:
        rows, shape = [], self.drafter.shape
        for slot in slot_B.tolist():
            paths = {(): self.text[slot]}
            tokens = [self.text[slot][-1]]
            for path in shape.paths:
                above = paths[path[:-1]]
                tokens.append(self.drafter.guess(above)[path[-1]])
                paths[path] = [*above, tokens[-1]]
            rows.append(tokens)
        tree = DraftTree.static(torch.tensor(rows), shape)
        return tree if depth is None else tree.cut(depth)


def watch_proposals(drafter: Drafter) -> list[DraftTree]:
    """All proposals of the states that this drafter opens from now on."""
    seen: list[DraftTree] = []
    own_open = drafter.open

    def watched(slots: int, max_len: int) -> DraftState:
        state = own_open(slots, max_len)
        propose = state.propose
        state.propose = lambda *a: seen.append(propose(*a)) or seen[-1]  # type: ignore[method-assign, func-returns-value]
        return state

    drafter.open = watched  # type: ignore[method-assign]
    return seen


def drafted_and_predicted(target: HFTarget, drafter: Drafter, prompt: list[int]) -> tuple[list[int], list[int]]:
    """The drafts below a root after the prompt, each the likeliest, and what `predict` names for them, given as text."""
    seen = watch_proposals(drafter)
    Decoder(target, drafter, "greedy", Sampling(), frozenset(), 12).run([prompt], 1)
    tree = seen[0]
    chain = [0]
    for path in sorted((p for p in drafter.proposal.paths if set(p) == {0}), key=len):
        children = (tree.parent_BN[0] == chain[-1]).nonzero()[:, 0].tolist()
        chain.append(children[0])
        assert len(chain) == len(path) + 1
    drafts = tree.token_BN[0, chain].tolist()
    text = torch.tensor([prompt + drafts])
    source = len(prompt) - 1
    ones = torch.ones_like(text, dtype=torch.bool)
    batch = TrainBatch(text, torch.arange(text.shape[1])[None], torch.zeros_like(text), ones)
    filled = Online(target, drafter.taps).fill(batch)
    predicted: dict[int, int] = {}
    with torch.no_grad():
        for prediction in drafter.predict(filled):
            best = prediction.whole(prediction.head(prediction.hidden_MH), 64).argmax(-1).tolist()
            for s, label, token in zip(prediction.source_M.tolist(), prediction.label_M.tolist(), best, strict=True):
                if (prediction.every_step and label > source + 1) or s == source:
                    predicted[label - source - 1] = token
    return drafts[1:], [predicted[i] for i in range(1, len(drafts))]


def oracle(texts: Sequence[Sequence[int]], vocab: int = 64) -> Callable[[list[int]], list[int]]:
    """Guesses the token that follows in one of these texts first, then others."""

    def guess(text: list[int]) -> list[int]:
        true = next((t[len(text)] for t in texts if len(t) > len(text) and list(t[: len(text)]) == text), 0)
        return [true, *(t for t in range(vocab) if t != true)]

    return guess


def random_guess(seed: int, vocab: int = 64) -> Callable[[list[int]], list[int]]:
    return lambda text: random.Random(hash((seed, *text))).sample(range(vocab), 8)


def never(texts: Sequence[Sequence[int]], vocab: int = 64) -> Callable[[list[int]], list[int]]:
    """Always wrong."""
    right = oracle(texts, vocab)
    return lambda text: right(text)[1:]


def read_conversations(options: DataOptions, replies: bool = True) -> list[Conversation]:
    """All usable conversations of these sources."""
    return read_usable(options, replies)[0]


def at_once(count: int, make: Callable[[int], Made]) -> list[Made]:
    """What so many forked processes make that begin together, by their number."""
    processes = multiprocessing.get_context("fork")
    together, found = processes.Barrier(count), processes.Queue()

    def begin(number: int) -> None:
        together.wait()
        found.put((number, make(number)))

    started = [processes.Process(target=begin, args=(number,)) for number in range(count)]
    for process in started:
        process.start()
    made = dict(found.get() for _ in started)
    for process in started:
        process.join()
    return [made[number] for number in range(count)]


def share_compiled(cache: Path) -> None:
    """Let processes with this `XDG_CACHE_HOME` find the operators that are compiled already: that takes minutes."""
    ours, theirs = cache_home() / "kernels", cache / "drafttrain" / "kernels"
    if not theirs.exists():
        ours.mkdir(parents=True, exist_ok=True)
        theirs.parent.mkdir(parents=True, exist_ok=True)
        theirs.symlink_to(ours)
