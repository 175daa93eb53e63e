"""Targets of text and images: the text is transformers', whatever drafts; positions, states and embeddings are the model's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drafttrain.core.sampling import Sampling
from drafttrain.data.chat import Encoded, join
from drafttrain.data.dataset import collate
from drafttrain.decoding.scheduler import Decoder
from drafttrain.features.online import Online
from drafttrain.measure.expected import forced_batch
from drafttrain.model.images import FIRST, chunk_ends, has_images, spans, with_placeholders
from drafttrain.model.target import FINAL, Taps
from drafttrain.targets import TargetOptions
from drafttrain.targets.images import ImageReader
from drafttrain.targets.load import load_target
from drafttrain.targets.vision import VisionTarget
from tests.helpers import Scripted, never, oracle, watch_proposals
from tests.images import NAMES, VOCAB, encoded, inline, picture, sequence, vision_target, write_target
from tests.tiny import SHAPES, build

NEW = 10
# positions of three parts, and features for later blocks; rows of an image that see each other; recurrent layers; embeddings of
# each layer, which see no image
KINDS = ("qwen3_vl", "gemma3", "qwen3_5", "gemma4")
FAMILIES = ("medusa", "eagle3", "dflash")
# have the same code as one of these
OTHERS = ("eagle", "mtp", "dspark", "dflash2", "xpress", "lilicorr", "domino", "jetspec", "dflare", "dfly")


@dataclass(frozen=True)
class Asked:
    """A target with prompts, some of them without an image, and transformers' greedy text for each."""

    target: VisionTarget
    prompts: list[list[int]]
    wanted: list[list[int]]


@pytest.fixture(
    scope="module", params=[name if name in KINDS else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def asked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Asked:
    folder = tmp_path_factory.mktemp(request.param)
    target = vision_target(request.param, folder)
    pictures = [picture(folder / f"{i}.png", i, size) for i, size in enumerate(((24, 16), (32, 16), (64, 64)))]
    prompts = [
        sequence(target, [pictures[0]], 1),
        sequence(target, [pictures[1], inline(pictures[2])], 2),
        [5, 121, 7, 120, 9],  # placeholders without an image
        sequence(target, [pictures[0], pictures[0]], 3),
        sequence(target, [pictures[2]], 4, text=9),
    ]
    return Asked(target, prompts, [generated(target, prompt) for prompt in prompts])


def generated(target: VisionTarget, prompt: list[int]) -> list[int]:
    inputs = target.generation_inputs(torch.tensor([prompt]))
    out = target.model.generate(**inputs, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


def chain(target: VisionTarget, family: str) -> dict[str, Any]:
    """Options of drafters whose fixed trees a target of chains refuses."""
    return {} if target.trees or "paths" not in SHAPES.get(family, {}) else {"paths": [[0], [0, 0], [0, 0, 0]]}


@pytest.mark.sampled
@pytest.mark.parametrize("chunk", [512, 7, 4])
def test_vision_target_greedy_tokens_equal_generate(asked: Asked, chunk: int) -> None:
    for rows, count in ((1, 3), (4, 5)):  # of the prompts: one by one, then together
        decoder = Decoder(asked.target, None, "greedy", Sampling(), frozenset(), NEW, prefill_chunk=chunk)
        assert [r.tokens for r in decoder.run(asked.prompts[:count], rows).results] == asked.wanted[:count]


def test_vision_target_other_image_changes_generated_tokens(asked: Asked, tmp_path: Path) -> None:
    other = sequence(asked.target, [picture(tmp_path / "other.png", 77)], 1)
    assert with_placeholders(other, 120) == with_placeholders(asked.prompts[0], 120)
    assert generated(asked.target, other) != asked.wanted[0]


@pytest.mark.sampled(asked=KINDS, family=FAMILIES)
@pytest.mark.parametrize("family", FAMILIES + OTHERS)
def test_vision_target_speculative_tokens_equal_generate(asked: Asked, family: str) -> None:
    for rows, count, chunk in ((1, 2, 512), (4, 5, 6)):
        drafter = build(family, asked.target, noise=0.5, **chain(asked.target, family))
        decoder = Decoder(asked.target, drafter, "greedy", Sampling(), frozenset(), NEW, prefill_chunk=chunk)
        results = decoder.run(asked.prompts[:count], rows).results
        assert [r.tokens for r in results] == asked.wanted[:count]
        assert asked.target.trees != asked.target.recurrent and sum(r.nodes for r in results)


@pytest.mark.sampled(asked=KINDS)
def test_vision_target_partly_rejected_drafts_keep_tokens_of_generate(asked: Asked) -> None:
    """What is rejected behind an image is taken back: positions, and states of recurrent layers."""
    texts = [prompt + text for prompt, text in zip(asked.prompts, asked.wanted, strict=True)]
    right, wrong = oracle(texts, VOCAB), never(texts, VOCAB)
    drafter = Scripted(lambda text: (right if len(text) % 3 else wrong)(text), [[0], [0, 0], [0, 0, 0]])
    drafter.images = True
    decoder = Decoder(asked.target, drafter, "greedy", Sampling(), frozenset(), NEW, prefill_chunk=6)
    results = decoder.run(asked.prompts, 4).results
    assert [r.tokens for r in results] == asked.wanted
    assert {length for r in results for length in r.lengths} == {1, 2, 3}


@pytest.mark.sampled(asked=KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_vision_drafter_first_drafts_equal_training_predictions(asked: Asked, family: str) -> None:
    """The first draft of every decode step is the likeliest token that training predicts from the same position."""
    prompt, text = asked.prompts[1], asked.wanted[1]
    drafter = build(family, asked.target, noise=0.5, **chain(asked.target, family))
    seen = watch_proposals(drafter)
    decoder = Decoder(asked.target, drafter, "greedy", Sampling(), frozenset(), NEW, prefill_chunk=8)
    (result,) = decoder.run([prompt]).results
    batch = Online(asked.target, drafter.taps).fill(forced_batch(prompt, text))
    with torch.no_grad():
        first = next(iter(drafter.predict(batch)))
        logits_MV = first.whole(first.head(first.hidden_MH), asked.target.shape.vocab_size)
    best = dict(zip(first.source_M.tolist(), logits_MV.argmax(-1).tolist(), strict=True))
    at, compared = len(prompt) - 1, 0
    for tree, length in zip(seen, result.lengths, strict=True):
        if at in best:
            compared += 1
            depth_one = tree.token_BN[0, tree.parent_BN[0] == 0].tolist()
            assert best[at] in depth_one
        at += length
    assert compared > 3


def test_vision_target_packed_and_padded_states_equal_single_document(asked: Asked) -> None:
    """A pass over several documents, and a prefill in chunks, give each image the states of its own document alone."""
    target, rows = asked.target, [encoded(prompt) for prompt in asked.prompts[:3]]
    wanted = [states(target, [row])[0] for row in rows]
    if not target.recurrent:  # which refuses packed rows
        together = states(target, [join(rows)])[0]
        assert torch.allclose(together, torch.cat(wanted), atol=2e-5)
    padded = states(target, rows)
    for row, want in enumerate(wanted):
        assert torch.allclose(padded[row, : len(want)], want, atol=2e-5)


def states(target: VisionTarget, rows: list[Encoded]) -> torch.Tensor:
    filled = Online(target, Taps()).fill(collate(rows, 0))
    return filled.hidden[FINAL]


def test_vision_target_states_are_what_the_next_block_reads(asked: Asked) -> None:
    """As engines give them: with the features that are added to the first blocks' outputs."""
    decoder: Any = asked.target.model.get_decoder()
    read = list[torch.Tensor]()

    def keep(module: Any, args: tuple[torch.Tensor, ...], given: dict[str, torch.Tensor]) -> None:
        read.append(args[0] if args else given["hidden_states"])

    hooks = [block.register_forward_pre_hook(keep, with_kwargs=True) for block in decoder.layers]
    taps = Taps(tuple(range(len(hooks) - 1)))
    hidden = Online(asked.target, taps).fill(collate([encoded(asked.prompts[1])], 0)).hidden
    for hook in hooks:
        hook.remove()
    assert all(torch.equal(hidden[number], read[number + 1]) for number in taps.blocks)


def test_vision_target_rotary_positions_equal_transformers(asked: Asked) -> None:
    target, prompt = asked.target, torch.tensor([asked.prompts[1]])
    image = prompt >= FIRST
    index = torch.arange(prompt.shape[1])[None]
    kv = target.new_cache(2, 128)
    target(prompt.expand(2, -1), kv, None, index.expand(2, -1), Taps())
    kv.extend([prompt.shape[1]] * 2)
    if not target.kind.rotary:
        assert kv.shift_B.tolist() == [0, 0]
        return
    grids = target.generation_inputs(prompt)["image_grid_thw"]
    shown = prompt.masked_fill(image, 120)
    wanted, delta = target.model.base_model.get_rope_index(shown, mm_token_type_ids=image.long(), image_grid_thw=grids)
    pictured = target._pictured(prompt[image])
    assert torch.equal(target._rotary(prompt, image, pictured, None, None, index), wanted)
    assert kv.shift_B.tolist() == [int(delta)] * 2
    kv.reset(torch.tensor([0]))
    assert kv.shift_B.tolist() == [0, int(delta)]


def test_vision_target_drafter_inputs_select_image_embeddings(asked: Asked) -> None:
    prompt = torch.tensor(asked.prompts[0])
    image, target = prompt >= FIRST, asked.target
    fused = target.embed(prompt)
    try:
        target.drafter_inputs = "placeholder"
        assert torch.equal(target.embed(prompt), target.embed(prompt.masked_fill(image, 120)))
    finally:
        target.drafter_inputs = "fused"
    assert not torch.allclose(fused[image], target.embed(torch.tensor(120)))
    assert torch.equal(fused[~image], target.embed(prompt[~image]))


def test_vision_target_image_features_are_computed_once(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    target, computed = asked.target, []
    own = target._computed
    monkeypatch.setattr(target, "_computed", lambda base: computed.append(base) or own(base))  # type: ignore[func-returns-value]
    monkeypatch.setattr(target, "_features", type(target._features)())
    Decoder(target, None, "greedy", Sampling(), frozenset(), 2, prefill_chunk=4).run(asked.prompts, 4)
    assert len(computed) == len(set(computed)) == 3


def test_vision_target_parallel_samples_equal_generate(asked: Asked) -> None:
    decoder = Decoder(asked.target, None, "greedy", Sampling(), frozenset(), NEW)
    from drafttrain.decoding.scheduler import Session

    request = replace(decoder.request(asked.prompts[0]), samples=2)
    session = Session(decoder, 2, decoder.positions(request), pages=40)
    results = session.submit(request)
    for _ in session:
        pass
    assert [r.tokens for r in results] == [asked.wanted[0]] * 2


@pytest.mark.sampled(asked=("qwen3_vl",))
def test_vision_target_repetition_penalty_equals_generate(asked: Asked) -> None:
    decoder = Decoder(asked.target, None, "greedy", Sampling(repetition_penalty=1.5), frozenset(), NEW)
    inputs = asked.target.generation_inputs(torch.tensor([asked.prompts[0]]))
    out = asked.target.model.generate(
        **inputs, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0, repetition_penalty=1.5
    )
    assert decoder.run(asked.prompts[:1]).results[0].tokens == out[0, len(asked.prompts[0]) :].tolist()


@pytest.mark.sampled(asked=("gemma3",))
def test_decoder_text_only_drafter_with_image_prompt_is_refused(asked: Asked) -> None:
    decoder = Decoder(asked.target, build("prompt_lookup", asked.target), "greedy", Sampling(), frozenset(), NEW)
    with pytest.raises(ValueError, match="reads text alone"):
        decoder.run(asked.prompts[:1])


@pytest.mark.parametrize("name", ["qwen3_5", pytest.param("qwen3_5_moe", marks=pytest.mark.slow)])
def test_target_with_class_of_text_alone_has_its_fingerprint_and_copies(name: str, tmp_path: Path) -> None:
    """The placements that read only text load that class: drafters of one load fit the other."""
    path = str(write_target(name, tmp_path))
    both, text = (load_target(TargetOptions(name="hf", path=path, weights=weights)) for weights in (None, "int8"))
    assert isinstance(both.images, ImageReader) and not isinstance(text.images, ImageReader)
    assert text.target.fingerprint == f"{both.target.fingerprint}-int8"
    text_cls = type(text.target.model)
    copy = both.target.pruned(4)
    assert type(copy.model) is text_cls is not type(both.target.model)
    token = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        assert torch.equal(copy.model(token).logits, text_cls.from_pretrained(path).eval()(token).logits)


def test_chunk_ends_keep_whole_images_together() -> None:
    image = [FIRST, FIRST + 1, FIRST + 2]
    prompt = [1, 2, *image, 3, *image, *image, 4]
    assert spans(prompt) == [(2, 5), (6, 9), (9, 12)]
    assert has_images(prompt) and not has_images([1, 2]) and not has_images([])
    assert chunk_ends([prompt], 4, whole=True) == [2, 6, 9, 13]
    assert chunk_ends([prompt], 2, whole=True) == [2, 5, 6, 9, 12, 13]
    assert chunk_ends([prompt], 4, whole=False) == [4, 8, 12, 13]
    assert chunk_ends([prompt, [1] * 5 + image], 4, whole=True) == [2, 5, 9, 13]
