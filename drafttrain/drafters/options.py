"""The options of every family, and what families share of them. The first line about a family is its line in `--help`.

No torch: composing a configuration reads this file alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from drafttrain.core.errors import UserError
from drafttrain.core.limits import above, at_least, choice, share, within
from drafttrain.model.lora import LoraSpec
from drafttrain.model.shapes import LayerOptions

TREES = ("chain", "static", "dynamic", "best_first")
# options of earlier versions, which checkpoints have
RENAMED = {
    "law_weight": "distribution_weight",
    "taps": "target_layer_ids",
    "tap_rule": "target_layer_rule",
}


@dataclass
class TreeOptions:
    """Options of every family whose drafts can be a tree. docs/families/eagle.md explains how trees grow."""

    # best_first: where drafts do not know each other
    tree: str = choice("static", *TREES)
    paths: list[list[int]] | None = None  # of a static tree, by rank; None: searched on held-out text after training
    width: int = 10  # dynamic: paths fed at each depth, and candidates of each
    nodes: int | None = None  # dynamic, best_first: of the proposal, root excluded; None: decode.tree_nodes


@dataclass
class BlockOptions(TreeOptions):
    """The block, the weights of its slots in training, and the tree that is drafted."""

    TAPS: ClassVar[int] = 5  # how many `target_layer_ids=None` are, in a target that is deep enough

    tree: str = "chain"
    width: int = 4  # as wide as a block of 16 can be
    block_size: int = within(16, 2, 256)  # slots, the anchor's included
    # in_place: slot k predicts the token k after the anchor. shifted: the one k + 1 after it
    slots: str = choice("in_place", "shifted")
    layers: int = at_least(5, 1)
    target_layer_ids: list[int] | None = None  # block outputs, from 0; None: five, evenly from 1 to n - 3
    mask_token: int | None = None  # an id that the target embeds; None: the last one
    anchors: int = at_least(512, 1)  # blocks of a sequence in one step at most
    causal: bool = False  # slots see no later slot of their block, in all layers
    # decay: exp(-k / gamma) for draft k from 0. dpace: by the drafter's own confidence. uniform
    weights: str = choice("decay", "dpace", "uniform")
    gamma: float | None = above(None, 0)  # None: 7, 5, 4 for blocks of 16, of 10, and smaller
    alpha: float = share(0.5)  # of dpace: 1 is no doubt in any draft, near 0 the drafter's own confidence
    causal_windows: bool = True  # in layers with a sliding window slots see no later slot of their block, as in vLLM and SGLang
    confidence: str | None = choice(None, "top1")  # top1: of chains, the probability of a draft's likeliest token, as in D-Cut
    layer: LayerOptions = field(default_factory=LayerOptions)

    def confident(self) -> bool:
        """Whether chains carry a confidence. Raises UserError for trees."""
        if self.confidence and self.tree != "chain":
            raise UserError(f"drafter.confidence is {self.confidence} and drafter.tree {self.tree}; set drafter.tree=chain")
        return self.confidence is not None

    def decay(self, drafts: int) -> list[float]:
        """The weight of each draft, in all 1."""
        gamma = default_gamma(self.block_size) if self.gamma is None else self.gamma
        decay = [1.0 if self.weights == "uniform" else math.exp(-step / gamma) for step in range(drafts)]
        return [weight / sum(decay) for weight in decay]


def default_gamma(size: int) -> float:
    """Of the official recipes, for blocks of 16, 10 and 8."""
    return 7.0 if size >= 16 else 5.0 if size >= 10 else 4.0


@dataclass
class CascadeOptions:
    """A cheaper drafter drafts the tokens of another, or both draft into one tree (arXiv 2312.11462).

    The options of two families, each with its `family`.
    """

    family: str = "cascade"
    middle: Any = field(default_factory=lambda: {"family": "draft_model"})  # trained; the figures are its own
    inner: Any = field(default_factory=lambda: {"family": "prompt_lookup"})  # drafts for the middle's model, or for the target
    # verify: the middle's model verifies the inner's drafts. merge: one tree. auto: verify where it has one
    join: str = choice("auto", "verify", "merge")


@dataclass
class DFlareOptions(BlockOptions):
    """DFlash whose layers read different mixtures of the target's states, by maps of their own."""

    TAPS: ClassVar[int] = 9

    family: str = "dflare"
    layers: int = 7
    target_layer_ids: list[int] | None = None  # block outputs, from 0; None: nine, evenly from 1 to n - 3


@dataclass
class DFlashOptions(BlockOptions):
    """A block of drafts in one pass over fused target states (arXiv 2602.06036)."""

    family: str = "dflash"
    draft_vocab: int | None = None  # so many of the target's tokens, the commonest in the training data, with a head of its own
    # in training a block begins with l true tokens, as likely as prefix_base ** l (arXiv 2606.04446); null: with one
    prefix_base: float | None = share(None)
    prefix_least: int = at_least(2, 1)  # the smallest l; the largest is block_size - 1

    def visible(self) -> list[float]:
        """How likely a block of training is to begin with 1, 2, ... true tokens; empty: with one. Raises UserError for none."""
        if self.prefix_base is None:
            return []
        lengths = range(1, self.block_size)
        if self.prefix_least not in lengths:
            raise UserError(
                f"drafter.prefix_least is {self.prefix_least}, drafter.block_size {self.block_size}; a block needs a draft: "
                f"set prefix_least below block_size"
            )
        longer = [length - self.prefix_least for length in lengths]  # relative to the smallest: a power never becomes 0 for all
        return [self.prefix_base**more if more >= 0 else 0.0 for more in longer]


@dataclass
class DFlash2Options(BlockOptions):
    """DFlash with short convolutions, and a selector that walks through its candidates."""

    family: str = "dflash2"
    causal_windows: bool = False
    group: int = 16  # channels that share what a position adds to the kernel of a convolution
    rank: int = at_least(256, 1)  # of the selector
    candidates: int = at_least(16, 2)  # tokens of a slot that it chooses from


@dataclass
class DFlyOptions(BlockOptions):
    """DFlash with a context for each layer, and each slot's state corrected by the token before it."""

    family: str = "dfly"
    block_size: int = 8
    # inner width of the correction by the token before; None: the hidden size
    hidden_correction_size: int | None = at_least(None, 1)


@dataclass
class DominoOptions(BlockOptions):
    """DFlash, corrected one draft after the other by a recurrent state over the drafts above."""

    family: str = "domino"
    state: int = at_least(1024, 1)  # units of the recurrent state over the tokens above a draft
    rank: int = at_least(256, 1)  # of the correction that it gives
    base_share: float = within(1.0, 0, 1)  # of the loss on slots alone at the start; it falls to 0
    base_until: float = share(1.0)  # share of the training steps after which it is 0


@dataclass
class DraftModelOptions(TreeOptions):
    """A small language model with its own cache (arXiv 2211.17192)."""

    family: str = "draft_model"
    tree: str = "chain"
    # pruned: the target's first blocks. scratch: its architecture, fresh weights. hf: `path`
    source: str = choice("pruned", "scratch", "hf")
    path: str | None = None  # hf: directory or hub id of a causal LM, safetensors
    revision: str | None = None
    blocks: int = at_least(3, 1)  # pruned, scratch
    hidden_size: int | None = None  # scratch; null: the target's
    # of adapters on every linear map but the head (arXiv 2106.09685); 0: all weights are trained
    lora_rank: int = at_least(0, 0)
    lora_alpha: int = above(16, 0)  # adapters count alpha / rank
    # int8, int4: of the weights that it decodes with; measured next to the unquantised ones
    quantize: str | None = choice(None, "int8", "int4")
    draft_length: int = at_least(4, 1)


@dataclass
class DSparkOptions(BlockOptions):
    """DFlash's block in one pass, then one draft after the other with a bias from the token before (arXiv 2607.05147)."""

    family: str = "dspark"
    draft_vocab: int | None = None  # so many of the target's tokens, the commonest in the training data, with a head of its own
    block_size: int = 7
    slots: str = "shifted"
    rank: int = at_least(256, 1)  # of the bias that the token before gives
    # stop: a block ends before its first unsupervised token. skip: later labels count, as in speculators
    gaps: str = choice("stop", "skip")


@dataclass
class EagleOptions(TreeOptions):
    """One decoder layer that predicts the target's next feature; with dynamic trees EAGLE-2 (arXiv 2401.15077, 2406.16858).

    The losses' weights are the official ones.
    """

    family: str = "eagle"
    tree: str = "chain"
    # forwards of training: the first on the target's features, each further one on the drafter's own
    steps: int = at_least(1, 1)
    draft_length: int = at_least(4, 1)
    bias: bool = True  # of fc, as officially; not every serving stack has a place for one (docs/export.md)
    distribution_weight: float = 0.1  # of the divergence between the distributions
    feature_weight: float = 1.0  # of the smooth L1 distance between the features
    noise: float = 0.0  # uniform in +- noise * 512 / length, added to the target's features in training; officially 0.1
    top_weight: float = 0.0  # of a cross-entropy over the target's likeliest tokens alone (HASS: 1)
    top_k: int = at_least(10, 1)  # how many those are
    layer: LayerOptions = field(default_factory=LayerOptions)


@dataclass
class Eagle3Options(TreeOptions):
    """One decoder layer over fused target states, trained on its own outputs (arXiv 2503.01840)."""

    family: str = "eagle3"
    tree: str = "chain"
    steps: int = at_least(3, 1)  # of training-time test
    growing_steps: bool = False  # training begins with one of these steps, and each further one joins after an equal part of it
    draft_length: int = at_least(4, 1)
    target_layer_ids: list[int] | None = None  # three block outputs, from 0; None: by the rule
    # official: 1, n/2 - 1, n - 4. thirds: the last of each third of the n blocks. auto: official, three others below 7 blocks
    target_layer_rule: str = choice("official", "thirds", "auto")
    step_decay: float = 0.8  # step i (from 0) weighs step_decay ** i in the loss
    draft_vocab: int | None = None  # so many of the target's tokens, the commonest in the training data; None: all
    fc_norm: bool = False  # EAGLE 3.1: an RMS norm of each tapped state
    norm_output: bool = False  # EAGLE 3.1: the normed state goes to the next step too
    norm_before_fc: bool = False  # one RMS norm of all tapped states together
    norm_before_residual: bool = False  # the residual is the normed state; officially not
    layers: int = at_least(1, 1)  # of attention and MLP; only the first reads the embedding
    qk_norm: bool = False  # an RMS norm of each query and key, as in Qwen3's blocks
    own_embedding: bool = False  # the embedding is trained too; false: the target's
    layer: LayerOptions = field(default_factory=LayerOptions)


@dataclass
class EarlyExitOptions(TreeOptions):
    """The target's first blocks, its norm and head; at most one attention layer is trained (arXiv 2404.16710, 2404.18911)."""

    family: str = "early_exit"
    tree: str = "chain"
    blocks: int | None = None  # of the target, from its first; null: a third of them
    adapter: bool = False  # one attention layer at the exit, the only thing trained
    draft_length: int = at_least(4, 1)


@dataclass
class HydraOptions(TreeOptions):
    """K heads that read the tokens drafted above them (arXiv 2402.05109)."""

    family: str = "hydra"
    heads: int = at_least(4, 1)
    layers: int = at_least(4, 1)  # blocks per head; the first one narrows state and embeddings to the hidden size
    prefix_layer: bool = False  # Hydra++: one decoder layer over the target's states, with its own KV cache
    head_decay: float = 1.0  # head k (from 1) weighs head_decay ** k in the loss


@dataclass
class JetSpecOptions(BlockOptions):
    """DFlash whose slots see no later slot, drafted as a best-first tree."""

    family: str = "jetspec"
    tree: str = "best_first"
    causal: bool = True
    weights: str = "uniform"


@dataclass
class LiLiCorrOptions(BlockOptions):
    """DFlash, with all its likeliest tokens scored together by a small bidirectional network."""

    family: str = "lilicorr"
    candidates: int = choice(8, 2, 4, 8, 16)  # tokens of a slot that are scored: 2, 4, 8 or 16
    hidden_size: int = at_least(1024, 1)  # of the corrector
    factor_dim: int = at_least(1024, 1)  # of the vectors whose products are the scores
    corrector_layers: int = at_least(2, 1)
    heads: int = at_least(8, 1)
    mlp_ratio: float = above(2.0, 0)
    logit_scale: float = above(8.0, 0)  # scores are within this and its negative
    vector_eps: float = above(1e-4, 0, below=0.5)  # smallest length that a vector is divided by
    ce_weight: float = at_least(0.25, 0)  # of the true token's cross-entropy among the candidates
    # of the candidates' expected distance below the true token in the target's logits
    penalty_weight: float = at_least(0.25, 0)
    # of `loss` between the choice among the candidates and the target; 0: as published
    divergence_weight: float = at_least(0.0, 0)


@dataclass
class MedusaOptions(TreeOptions):
    """K residual heads on the target's last hidden state (arXiv 2401.10774)."""

    family: str = "medusa"
    heads: int = at_least(4, 1)
    layers: int = at_least(1, 1)  # residual blocks per head
    init: str = choice("copy", "share")  # copy: own output matrices, from the target's. share: the target's own, frozen
    head_decay: float = 0.8  # head k (from 1) weighs head_decay ** k in the loss
    adapter: LoraSpec = field(default_factory=lambda: LoraSpec(rank=0))  # Medusa-2, from rank 1: the target is trained too


@dataclass
class MLPSpeculatorOptions(TreeOptions):
    """A small recurrent network of its own width, one stage per draft (arXiv 2404.19124)."""

    family: str = "mlp_speculator"
    n_predict: int = at_least(3, 1)
    inner_dim: int | None = at_least(None, 1)  # of the states; null: the target's hidden size
    tie_weights: bool = False  # one set for all stages; the first projection stays apart
    scale_input: bool = False  # the target's state is brought to a root mean square of 1 / sqrt 2 first


@dataclass
class MTPOptions(TreeOptions):
    """One block like the target's at every depth; it reads the next token and the hidden state before it (arXiv 2412.19437)."""

    family: str = "mtp"
    tree: str = "chain"
    steps: int = at_least(3, 1)  # of training on own outputs
    step_decay: float = above(0.8, 0)  # step i (from 0) weighs step_decay ** i in the loss
    draft_length: int = at_least(4, 1)
    norm_output: bool = False  # the normed state goes to the next depth; DeepSeek's is not normed
    qk_norm: bool = False  # of each head's query and key, as in Qwen3's blocks
    layer: LayerOptions = field(default_factory=LayerOptions)


@dataclass
class MTPNativeOptions(TreeOptions):
    """The MTP module that a target comes with, fine-tuned for several depths (arXiv 2509.18362)."""

    family: str = "mtp_native"
    tree: str = "chain"  # as serving stacks draft with such modules
    source: str = "target"  # target: the target's own checkpoint. fresh: random. Else the directory of another checkpoint
    steps: int = at_least(3, 1)  # of training on own outputs
    step_decay: float = above(0.6, 0)  # step i (from 0) weighs step_decay ** i; the weights add up to 1 (arXiv 2509.18362)
    draft_length: int = at_least(3, 1)
    modules: int | None = at_least(None, 1)  # more than 1: one for each depth; null: as many as the files have, of fresh ones 1
    norm_output: bool | None = None  # the normed state goes to the next depth; null: as the target's layout says


@dataclass
class PardOptions(DraftModelOptions):
    """A small language model that drafts all tokens in one pass, from masks (arXiv 2504.18583)."""

    family: str = "pard"
    width: int = 4
    draft_length: int = 8
    mask_token: int | None = None  # an id that the model embeds; None: the last one
    retention: float = share(0.7)  # in training a share retention ** d of the anchors has a mask d
    least_retention: float = within(0.2, 0, 1)  # and no less than this


@dataclass
class PEagleOptions(TreeOptions):
    """EAGLE-3 that drafts all tokens in one pass, from masks (arXiv 2602.01469)."""

    family: str = "peagle"
    tree: str = "chain"
    width: int = 4
    draft_length: int = at_least(8, 1)
    layers: int = at_least(4, 1)
    target_layer_ids: list[int] | None = None  # three block outputs, from 0; None: by the rule
    # official: 1, n/2 - 1, n - 4. thirds: the last of each third of the n blocks. auto: official, three others below 7 blocks
    target_layer_rule: str = choice("official", "thirds", "auto")
    mask_token: int | None = None  # an id of the embedding; None: the last one
    retention: float = share(0.8)  # in training a share retention ** d of the anchors has a slot d
    least_retention: float = within(0.2, 0, 1)  # and no less than this
    draft_vocab: int | None = None  # so many of the target's tokens, the commonest in the training data; None: all
    fc_norm: bool = False  # EAGLE 3.1: an RMS norm of each tapped state
    norm_before_fc: bool = False  # one RMS norm of all tapped states together
    qk_norm: bool = False  # an RMS norm of each query and key, as in Qwen3's blocks
    norm_before_residual: bool = False  # the residual of the first layer is the normed state
    layer: LayerOptions = field(default_factory=LayerOptions)


@dataclass
class PromptLookupOptions:
    """Copies the tokens that followed an earlier occurrence of the last tokens; nothing is trained."""

    family: str = "prompt_lookup"
    # tokens matched at most; null: the longest suffix of the text that occurred before
    max_ngram: int | None = at_least(3, 1, null=True)
    min_ngram: int = at_least(1, 1)  # tokens matched at least
    draft_length: int = at_least(10, 1)  # tokens copied at most


@dataclass
class ReDrafterOptions:
    """A recurrent head on the target's last hidden state, with beam search (arXiv 2403.09919)."""

    family: str = "redrafter"
    layers: int = at_least(2, 1)  # residual blocks before the output matrix
    steps: int = at_least(5, 1)  # unrolled in training
    width: int = at_least(10, 1)  # beams
    length: int = at_least(4, 1)  # drafts in a beam; the official length counts the root too
    # most drafts of a proposal, the likeliest first; None: decode.tree_nodes, set after training
    nodes: int | None = within(None, 1, 255)
    dropped: bool = True  # offer also the states that the search had among its beams once and left; officially not


@dataclass
class SuffixOptions:
    """The tokens that most often followed the last, here or in earlier replies; nothing is trained (arXiv 2411.04975)."""

    family: str = "suffix"
    depth: int = at_least(32, 1)  # tokens of a text's end matched at most
    draft_length: int = at_least(16, 1)
    factor: float = at_least(1.0, 0)  # after a match of m tokens at most factor * m + offset are drafted
    offset: float = 0.0
    min_probability: float = share(0.1)  # a draft ends where its frequencies multiply to less
    past: int = at_least(65536, 0)  # tokens of earlier texts kept, about; 0: each text by itself


@dataclass
class UnoOptions(TreeOptions):
    """A LoRA that makes the target its own drafter, at random tokens after the text (SGLang's UNO)."""

    family: str = "uno"
    tree: str = "chain"
    width: int = 4
    draft_length: int = at_least(4, 1)  # K: the root and K - 1 random tokens in a drafting pass, K drafts
    lora_rank: int = at_least(16, 1)
    lora_alpha: float = above(32.0, 0)  # the matrices' product counts alpha / rank
    lora_targets: list[str] = field(default_factory=list)  # last names of linear maps, such as q_proj; none: all in the blocks
    retention: float = share(0.7)  # in training a share retention ** d of the anchors has d random tokens
    least_retention: float = within(0.2, 0, 1)  # and no less than this


@dataclass
class XPressOptions(BlockOptions):
    """DFlash, refined by a small causal mixer that reads all drafts above."""

    family: str = "xpress"
    gamma: float | None = 4.0
    rank: int = at_least(256, 1)  # width of the refiner
    mlp_hidden: int | None = at_least(None, 1)  # inner width of the refiner's MLP; None: twice the rank
    free_passes: int = at_least(3, 0)  # passes of a training step in which the refiner reads its own drafts
    free_weight: float = at_least(0.3, 0)  # of the loss of all of these passes together
    base_weight: float = at_least(0.6, 0)  # of the loss of the slots' own logits
