"""Drafts by a model of another tokenizer: text there and back, pieces of characters, ends, and exact output."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.decoding.scheduler import Decoder
from drafttrain.drafters.draft_model import DraftModel, DraftModelOptions, TranslatedDraft, Translation, build, recent
from drafttrain.model.drafter import Commit
from drafttrain.targets import TargetOptions
from drafttrain.targets.companion import companion
from drafttrain.targets.load import LoadedTarget, load_target

WORDS = ["the cat sat on the mat", "a hat, a bat and the café", "naïve 🙂 cats chat at that", "he hello hell help"]


def tokenizer(merges: int, begin: bool = False) -> PreTrainedTokenizerFast:
    """Bytes, and so many joined pieces of them."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<eos>", *(["<bos>"] if begin else [])]
    size = 256 + len(special) + merges
    bpe.train_from_iterator(
        WORDS, trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    )
    names = {"eos_token": "<eos>"} | ({"bos_token": "<bos>"} if begin else {})
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **names)


def folder(path: Path, merges: int, seed: int, max_positions: int = 256) -> str:
    """A random model whose likeliest tokens are letters, so that its text is one for long stretches."""
    tokens = tokenizer(merges)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokens), max_position_embeddings=max_positions, **sizes))
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.normal_(0.0, 1.2 / parameter.shape[1] ** 0.5)
    model.save_pretrained(path)
    tokens.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {
        "target": folder(root / "target", 24, 0),
        "other": folder(root / "other", 4, 1),
        "short": folder(root / "short", 4, 1, max_positions=40),
        "same": folder(root / "same", 24, 2),
    }


@pytest.fixture(scope="module")
def loaded(places: dict[str, str]) -> LoadedTarget:
    return load_target(TargetOptions(name="hf", path=places["target"]))


@pytest.mark.sampled
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["other", "short"])
def test_translated_draft_output_equals_plain_decoding(
    places: dict[str, str], loaded: LoadedTarget, name: str, batch: int
) -> None:
    """Of a random target: half its tokens are no whole characters. The short draft model forgets a text's beginning."""
    drafter = build(DraftModelOptions(source="hf", path=places[name]), loaded.target)
    assert isinstance(drafter, TranslatedDraft) and not drafter.trained and not drafter.captured and drafter.remark
    assert not drafter.state_dict()
    asked = [list(loaded.tokenizer(text)["input_ids"]) for text in (*WORDS, "t", "the cat sat on the mat " * 3)]
    plain, ours = (
        Decoder(loaded.target, d, "greedy", Sampling(), frozenset({0}), 40).run(asked, n).results
        for d, n in ((None, 1), (drafter, batch))
    )
    assert [r.tokens for r in ours] == [r.tokens for r in plain]
    sampling = Sampling(0.8, seed=3)
    plain, ours = (
        Decoder(loaded.target, d, policy, sampling, frozenset({0}), 30).run(asked, 3).results
        for d, policy in ((None, "lossless"), (drafter, "coupled"))
    )
    assert [r.tokens for r in ours] == [r.tokens for r in plain]


class Writer:
    """A draft model that writes the rest of one text, in its own tokens."""

    def __init__(self, tokens: list[int], vocab: int, lm: Any) -> None:
        self.tokens, self.vocab, self.lm, self.shape = tokens, vocab, lm, lm.shape
        self.fed = 0

    def new_cache(self, *sizes: int) -> Any:
        return self.lm.new_cache(*sizes)

    def requires_grad_(self, mode: bool) -> Writer:
        return self

    def eval(self) -> Writer:
        return self

    def __call__(self, token_BN: torch.Tensor, kv: Any, ancestor: Any, position_BN: torch.Tensor, taps: Any, row: Any) -> Any:
        self.fed += token_BN.shape[1]
        out = self.lm(token_BN, kv, ancestor, position_BN, taps, row)
        at_B = position_BN.gather(1, row)[:, 0] + 1
        best_B = torch.tensor([self.tokens[i] if i < len(self.tokens) else 0 for i in at_B.tolist()])
        out.logits_BRV.copy_(torch.nn.functional.one_hot(best_B, self.vocab)[:, None].float())
        return out


def test_translated_draft_exact_model_is_accepted_and_reads_tokens_once(places: dict[str, str], loaded: LoadedTarget) -> None:
    """And reads each of its own tokens about once: what was accepted stays in its cache."""
    found = companion(loaded.target, places["other"], None)
    story = "the cat sat on the mat, a naïve 🙂 café cat"
    tokens = list(loaded.tokenizer(story)["input_ids"])
    mine = [*found.tokenizer(story)["input_ids"], 0]
    writer = Writer(mine, len(found.tokenizer), found.model)
    drafter = TranslatedDraft(writer, Translation(loaded.tokenizer, found.tokenizer), 4)
    state, slot_B = drafter.open(2, 100), torch.tensor([0])
    known, rounds = 1, 0
    state.tokens[0] = tokens[:1]
    while known < len(tokens):
        tree = state.propose(slot_B, Sampling())
        drafts = tree.token_BN[0, 1 : int(tree.count_B[0])].tolist()
        assert tree.token_BN[0, 0] == tokens[known - 1]
        right = next((i for i, t in enumerate(drafts) if [*tokens, 0][known + i : known + i + 1] != [t]), len(drafts))
        after = tokens[known : known + right + 1]
        commit = Commit(torch.tensor([[tokens[known - 1], *after[:-1]]]), torch.tensor([after]), {}, torch.tensor([len(after)]))
        state.observe(commit, slot_B)
        known, rounds = known + len(after), rounds + 1
    assert rounds < len(tokens) / 2
    assert writer.fed < 2.5 * len(mine) + 4 * rounds


def test_translation_draft_text_becomes_target_tokens(subtests: pytest.Subtests) -> None:
    ours, theirs = tokenizer(24), tokenizer(4)
    both = Translation(ours, theirs)
    for text, new, wanted in (
        ("the cat", " sat on", " sat on"),
        ("the c", "at", None),  # joins what is written already
        ("", "the cat", "the cat"),
        ("a naïve", "", ""),
    ):
        with subtests.test(text=text, new=new):
            token, written = list(ours(text)["input_ids"]), list(theirs(new)["input_ids"])
            known = both.to_draft(token)
            assert theirs.decode(known) == text
            found = both.to_target(token, known, written)
            assert found == ([] if wanted is None else list(ours(text + wanted)["input_ids"])[len(token) :])


def test_translation_partial_character_waits_until_completed() -> None:
    ours, theirs = tokenizer(0), tokenizer(4)
    both, smile = Translation(ours, theirs), list(ours("🙂")["input_ids"])
    token = [*ours("hat ")["input_ids"], *smile[:2]]
    known = both.to_draft(token)
    assert theirs.decode(known) == "hat " and len(smile) == 4
    written = list(theirs("🙂 a")["input_ids"])
    assert both.to_target(token, known, written) == [*smile[2:], *ours(" a")["input_ids"]]
    assert both.to_target(token, known, list(theirs("🙃")["input_ids"])[:3]) == []
    assert both.to_target(token, known, list(theirs("at")["input_ids"])) == []


def test_translation_eos_is_mapped_and_special_tokens_are_left_out() -> None:
    ours, theirs = tokenizer(24), tokenizer(4, begin=True)
    both = Translation(ours, theirs)
    token = [0, *ours("the cat")["input_ids"]]
    known = both.to_draft(token)
    assert theirs.decode(known) == "the cat"  # no special token of the target's in it
    eos = theirs.eos_token_id
    written = [*theirs(" sat")["input_ids"], eos, *theirs(" on")["input_ids"]]
    assert both.to_target(token, known, written) == [*ours(" sat")["input_ids"], ours.eos_token_id]
    assert both.to_target(token, known, [eos]) == [ours.eos_token_id]


def test_translation_recent_text_is_cut_in_strides() -> None:
    text = list(range(25))
    assert recent(text, 30) == text
    starts = [recent(text[:n], 10)[0] for n in range(10, 26)]
    assert (
        starts == sorted(starts) and set(starts) == {0, 5, 10, 15} and all(len(recent(text[:n], 10)) <= 10 for n in range(26))
    )


def test_draft_model_with_same_vocabulary_is_not_translated(
    places: dict[str, str], loaded: LoadedTarget, tmp_path: Path
) -> None:
    target = loaded.target
    assert isinstance(build(DraftModelOptions(source="hf", path=places["same"]), target), DraftModel)
    with pytest.raises(UserError, match="lora_rank=0"):
        build(DraftModelOptions(source="hf", path=places["other"], lora_rank=2), target)
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((Path(places["other"]) / file).read_bytes())
    with pytest.raises(UserError, match="has no weights"):
        build(DraftModelOptions(source="hf", path=str(tmp_path)), target)


def test_translated_draft_restored_state_proposes_same_tokens(places: dict[str, str], loaded: LoadedTarget) -> None:
    drafter = build(DraftModelOptions(source="hf", path=places["other"]), loaded.target)
    state, slot_B = drafter.open(2, 100), torch.tensor([1])
    state.tokens[1] = list(loaded.tokenizer(WORDS[0])["input_ids"])
    state.propose(slot_B, Sampling())
    twin, before = deepcopy(state, {id(drafter): drafter}), state.snapshot(slot_B)
    state.tokens[1] = [*state.tokens[1], 9, 40, 41]
    state.propose(slot_B, Sampling())
    state.restore(slot_B, before)
    a, b = (s.propose(slot_B, Sampling()) for s in (state, twin))
    assert torch.equal(a.token_BN, b.token_BN) and torch.equal(a.count_B, b.count_B)
