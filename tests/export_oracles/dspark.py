"""DSpark as serving stacks and speculators read it: DFlash's block, a bias from the token before, a confidence head.

Shapes: K drafts, H hidden, R rank, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from tests.export_oracles.dflash import (
    DraftBlockShape,
    Reader,
    causal_of,
    check_raw,
    check_vocabulary,
    first_slot,
    head_of,
    of_speculators,
    raw_block,
    slots,
    tokens_before,
    with_sinks,
)
from tests.export_oracles.parts import Config, MismatchError, Point, Reading, TargetParts, Tensors, each, over_target

TRTLLM_KEYS = ("mask_token_id", "target_layer_ids", "block_size", "markov_rank", "markov_head_type", "shift_label", "causal")
COPIES = ("embed_tokens.weight", "lm_head.weight")  # of the target's, in the authors' files


def deepspec(stack: str) -> Reader:
    """The authors' layout, as this stack reads it. Only the authors' code drafts with the copies in the file."""

    def read(directory: Path, target: TargetParts, points: Sequence[Point]) -> Reading:
        config, tensors = Config.of(directory), Tensors(directory)
        check_raw(config, "Qwen3DSparkModel", target)
        check_vocabulary(config, tensors)
        block = raw_block(config, config, causal_of(config, Config({}), stack), first_slot(config))
        if stack == "vllm":
            own = config.inside("dflash_config", "layer ids")  # without it as many blocks as layers would be tapped
            own.get("target_layer_ids", "layer ids")
            block = with_sinks(block, own)
        if stack == "official":
            if not config.get("sample_from_anchor", "config"):
                raise MismatchError("config", "sample_from_anchor is false, which the authors' code does not have")
            config.get("num_anchors", "config")  # the class is not built without it
            embed, head = (tensors.take(name, *target.embed.shape) for name in COPIES)
            target = replace(target, embed=embed, head=head)
        for name in COPIES if "d2t" not in tensors.left else COPIES[:1]:
            tensors.left.pop(name, None)
        return reading(block, tensors, ("fc", "hidden_norm"), _rank(config), target, points)

    return read


def trtllm(directory: Path, target: TargetParts, points: Sequence[Point]) -> Reading:
    """The authors' layout, as TensorRT-LLM reads it (`decoding_type: DSpark`, tensorrt_llm/llmapi/llm_args.py and
    _torch/models/modeling_dspark.py of its main branch). It looks for each key in `dspark_config`, in `dflash_config`, and at
    the top level, as `dspark_<key>` and as `<key>`. Slots are shifted unless `shift_label` is false, it sorts the layer ids,
    and it reads no confidence.
    """
    config, tensors = Config.of(directory), Tensors(directory)
    check_raw(config, "Qwen3DSparkModel", target)
    found = Config(
        config.values | {key: value for key in TRTLLM_KEYS if (value := _resolved(config, key)) is not None}, config.where
    )
    if found.values.get("shift_label") is False:
        raise MismatchError("slots", "shift_label is false, but TensorRT-LLM wants as many drafts as a block has slots")
    if found.values.get("causal"):
        raise MismatchError("config", "causal is true, which TensorRT-LLM refuses")
    ids = found.get("target_layer_ids", "layer ids")
    if ids != sorted(set(ids)):
        raise MismatchError("layer ids", f"target_layer_ids are {ids}, but TensorRT-LLM sorts them")
    block = raw_block(found, found, causal_of(config, found, "trtllm"), first=0)
    return reading(block, tensors, ("fc", "hidden_norm"), _rank(found), target, points)


def _resolved(config: Config, key: str) -> Any:
    """The value of a key in the first place where it is; None where it is nowhere."""
    inside = [config.values.get(name) or {} for name in ("dspark_config", "dflash_config")]
    places = [*(inner.get(key) for inner in inside), config.values.get(f"dspark_{key}"), config.values.get(key)]
    return next((value for value in places if value is not None), None)


def speculators(directory: Path, target: TargetParts, points: Sequence[Point]) -> Reading:
    """speculators' layout."""
    config, block = of_speculators(directory, "dspark", "DSparkSpeculator", target, per_layer=True)
    return reading(block, Tensors(directory), ("fc", "hidden_norm"), _rank(config), target, points)


def _rank(config: Config) -> int:
    """Raises MismatchError for other forms of the heads than the ones that are read."""
    config.expect("markov_head_type", "vanilla", "config")
    for key in ("enable_confidence_head", "confidence_head_with_markov"):
        config.expect(key, True, "config")
    rank: int = config.get("markov_rank", "config")
    return rank


def reading(
    block: DraftBlockShape, tensors: Tensors, names: tuple[str, str], rank: int, target: TargetParts, points: Sequence[Point]
) -> Reading:
    """Draft from the states of a block, with the bias. names: as for `slots`. rank: -1 for that of the tensors."""
    vocab, states = len(target.embed), slots(block, tensors, names, target)
    first_VR = tensors.take("markov_head.markov_w1.weight", vocab, rank, fails="config")
    head, _, ids = head_of(tensors, target)
    second_DR = tensors.take("markov_head.markov_w2.weight", len(ids), first_VR.shape[1], fails="config")
    tensors.take("confidence_head.proj.weight", 1, block.shape.width + first_VR.shape[1])
    tensors.take("confidence_head.proj.bias", 1)
    tensors.finish()

    def draft(point: Point) -> Tensor:
        state_KH = states(point)
        logits_KD = F.linear(state_KH, head) + F.linear(first_VR[tokens_before(point, len(state_KH))], second_DR)
        return over_target(logits_KD, ids, vocab)

    return Reading(each(points, draft), block.facts() | {"d2t": ids.tolist()})
