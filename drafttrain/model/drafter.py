"""The interfaces of a drafter: the trained module, its decoding state, optional roles, and references that own nothing.

Shapes: B rows, A committed positions, N tree nodes, S slots, R slots to reset, M samples, K draft depth, C candidates,
H hidden, V vocabulary.

`Drafter` is trained. `Drafter.open` makes a `DraftState`, which drafts for one decoding session. `Drafter.proposal` says which
tree is drafted. `Drafter.calibration` turns confidences into probabilities, in families that have confidences.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Lane, Sampling
from drafttrain.core.tree import DraftTree
from drafttrain.model.batch import Prediction, TrainBatch
from drafttrain.model.kv_cache import KVCache
from drafttrain.model.lora import LoraSpec
from drafttrain.model.proposal import Proposal
from drafttrain.model.shapes import TargetShape
from drafttrain.model.target import PrunedTarget, Taps, Target
from drafttrain.ops.sampling import distribution, sample, shaped
from drafttrain.ops.top import over_vocabulary

T = TypeVar("T")


class FrozenRef(Generic[T]):
    """Holds a module that another module uses without owning it.

    torch registers a module that is assigned to an attribute of another one: it would be trained, moved, sharded and saved
    with the holder. It does not find a module inside this object.
    """

    __slots__ = ("module",)

    def __init__(self, module: T) -> None:
        self.module = module


DOUBT = 1e-6  # of a token whose probability rounds to 1


@dataclass(frozen=True, slots=True)
class Commit:
    """Newly accepted positions, in order, aligned on A. Columns past a row's count are padding."""

    token_BA: Tensor  # the token at the position
    next_BA: Tensor  # the token after it: the next accepted draft, at the last position the bonus token
    hidden: dict[int, Tensor]  # by tap: the target's state at the position, [B, A, H]
    count_B: Tensor  # accepted positions of each row

    @property
    def last_B1(self) -> Tensor:
        """The column of each row's last position; 0 for a row without positions."""
        return (self.count_B - 1).clamp_min(0)[:, None]

    @property
    def root_B(self) -> Tensor:
        """The token after each row's last position: the root of its next tree."""
        return self.next_BA.gather(1, self.last_B1)[:, 0]

    def hidden_at(self, column_B1: Tensor) -> dict[int, Tensor]:
        """The target's states at one column of each row, [B, 1, H]."""
        return {k: h.gather(1, column_B1[..., None].expand(-1, -1, h.shape[-1])) for k, h in self.hidden.items()}

    def split(self, columns: int) -> Iterator[Commit]:
        """The same positions in parts of at most so many columns. A row that ends before a part has count 0 in it."""
        for start in range(0, max(1, self.token_BA.shape[1]), columns):
            column_slice = slice(start, start + columns)
            hidden = {key: x_BAH[:, column_slice] for key, x_BAH in self.hidden.items()}
            count_B = (self.count_B - start).clamp(0, columns)
            yield Commit(self.token_BA[:, column_slice], self.next_BA[:, column_slice], hidden, count_B)


class DraftState(ABC):
    """Drafts for the requests of one decoding session. Made by `Drafter.open`.

    In a captured decode step `observe`, `catch_up` and `propose` do not sync with the host and keep shapes and addresses.
    """

    @abstractmethod
    def reset(self, slot_R: Tensor) -> None:
        """New requests take these slots."""

    @abstractmethod
    def observe(self, commit: Commit, slot_B: Tensor) -> None:
        """Store the accepted positions of these slots. Compute nothing while there is room: an idle drafter is cheap."""

    def observe_prompt(self, commit: Commit, slot_B: Tensor) -> None:
        """Read a chunk of these slots' prompts. A row whose prompt has ended before the chunk has count 0."""
        self.observe(commit, slot_B)

    def catch_up(self, slot_B: Tensor) -> None:  # noqa: B027
        """Process stored positions that the next proposal does not need. Called in decode steps without a proposal."""

    @abstractmethod
    def propose(self, slot_B: Tensor, sampling: Sampling, depth: int | None = None) -> DraftTree:
        """Draft a tree for each slot. depth: deepest level allowed, from 1; None: the drafter's own draft length."""

    @property
    def caches(self) -> list[KVCache]:
        """The drafter's own KV caches; the session bounds their lengths."""
        return []


class RevertibleState(DraftState):
    """A state that can forget what it observed. A cascade needs it for its inner drafter."""

    @abstractmethod
    def snapshot(self, slot_B: Tensor) -> Any:
        """What `restore` needs to forget everything that these slots observe from now on."""

    @abstractmethod
    def restore(self, slot_B: Tensor, snapshot: Any) -> None:
        """Forget what these slots observed after the snapshot."""


class Calibration(Protocol):
    """Turns the logits of a drafter's confidences into probabilities of acceptance."""

    def fit(self, confidence_MK: Tensor, top1_MK: Tensor, acceptance_MK: Tensor) -> None:
        """Fit on held-out text.

        confidence_MK: logits (`Prediction.confidence`). top1_MK: whether the draft was the text's token. acceptance_MK: the
        probability that the target accepts a sampled draft, sum min(p, q).
        """
        ...

    def acceptance_probability(self, confidence_MK: Tensor, sampled: bool) -> Tensor:
        """[M, K] P(draft k is accepted, if those above it are). sampled: drafts are sampled, not argmax."""
        ...

    def settings(self) -> dict[str, Any]:
        """The settings to save: JSON values only."""
        ...

    def use(self, settings: Mapping[str, Any]) -> None:
        """Take the saved settings."""
        ...


class Drafter(nn.Module, ABC):
    """The trained part of a family. It keeps no decoding state: `open` makes that.

    A drafter may contain other drafters as submodules (`parts`); their options, settings and training are handled here.
    """

    taps: Taps  # the target's states that it reads
    samples: bool = False  # at a temperature above 0 it samples chains, which carry their draft distribution q
    revertible: bool = False  # `open` gives a `RevertibleState`
    adapts: LoraSpec | None = None  # the family also trains the target; the adapted target is then the baseline
    starts_usable: bool = False  # it can draft before it is trained, so that measuring it then makes sense
    remark: str = ""  # one line that a user should know before a run
    recomputes: bool = False  # in training, layers keep only their inputs and compute the rest again for the gradient
    layer_shape: TargetShape | None = None  # the shape of the drafter's own decoder layers
    trained: bool = True  # False: nothing is trained, and `fit` only measures
    splits: bool = True  # processes can split its sequences (train.sequence_parallel)
    images: bool = False  # it reads images, by the target's embeddings or states alone
    confident: bool = False  # its confidence in a draft is the probability of its likeliest token (`confidence_of`)

    def __init__(self, proposal: Proposal) -> None:
        super().__init__()
        self.proposal = proposal
        self.calibration: Calibration | None = None
        self.tuned: dict[int, Mapping[str, Any]] = {}  # decode settings by batch size, where tuning chose any

    @property
    def captured(self) -> bool:
        """Whether its decode steps can be captured as CUDA graphs, see `DraftState`."""
        return all(component.captured for component in self.parts.values())

    @property
    def draft_length(self) -> int:
        """K: the depth of the deepest proposal."""
        return self.proposal.draft_length

    @property
    def parts(self) -> dict[str, Drafter]:
        """The drafters inside this one, by attribute name."""
        return {name: module for name, module in self.named_children() if isinstance(module, Drafter)}

    @abstractmethod
    def predict(self, batch: TrainBatch) -> Iterator[Prediction]:
        """Predictions for training, one step (or head) at a time, in drafting order."""

    @abstractmethod
    def open(self, slots: int, max_len: int) -> DraftState:
        """A state for a session of `slots` concurrent requests of at most `max_len` positions each."""

    def prepare(self, counts: Callable[[], Tensor]) -> None:
        """Called once before training. counts: how often each target token is supervised in the training data, [V]."""
        for component in self.parts.values():
            component.prepare(counts)

    def recompute(self) -> None:
        """Set `recomputes` here and in all parts."""
        self.recomputes = True
        for module in self.children():
            if isinstance(module, Drafter | PrunedTarget):
                module.recompute()

    def training_positions(self, length: int) -> int:
        """Positions that one sequence of this length sends through the drafter's layers in training, at most."""
        components = self.parts.values()
        return (
            sum(component.training_positions(length) for component in components if component.trained) if components else length
        )

    @property
    def label_offset(self) -> int:
        """The largest distance between a prediction's source and its label, in positions."""
        return max((component.label_offset for component in self.parts.values()), default=self.draft_length + 1)

    @property
    def max_new_positions(self) -> int:
        """New positions of one pass at most: a tree, or the pending positions and the root in the drafter's own cache."""
        return max(self.proposal.max_nodes, self.draft_length + 2)

    def variants(self) -> dict[str, Drafter]:
        """Copies that decode in other ways, by name; they are measured next to this one. Call it before decoding."""
        return {}

    def language_model(self) -> Target | None:
        """The causal LM whose next tokens are the drafts, if there is one. It can verify a cheaper drafter's drafts."""
        return None

    def resolved_options(self) -> dict[str, Any]:
        """Options that were left to a rule, with the values that the rule gave for this target; plain data."""
        return {}

    def decode_settings(self) -> dict[str, Any]:
        """What decoding needs besides weights and options (a searched tree, for example); JSON values only."""
        settings = self.proposal.settings() | ({} if self.calibration is None else self.calibration.settings())
        return settings | {name: component.decode_settings() for name, component in self.parts.items()}

    def use_decode_settings(self, settings: Mapping[str, Any]) -> None:
        """Take saved `decode_settings`, and what tuning preferred. Raises UserError for a tree that cannot be drafted."""
        for name, component in self.parts.items():
            component.use_decode_settings(settings.get(name, {}))
        self.proposal.use(settings)
        if self.calibration is not None:
            self.calibration.use(settings)

    def tuned_size(self, batch_size: int) -> int | None:
        """The batch size whose tuned settings hold here: the nearest smaller one, else the smallest; None: none is tuned."""
        return max((size for size in self.tuned if size <= batch_size), default=min(self.tuned, default=None))

    def use_batch_size(self, batch_size: int) -> None:
        """Propose as tuning chose for so many requests at a time. Call it before decoding."""
        if (size := self.tuned_size(batch_size)) is not None:
            self.use_decode_settings(self.tuned[size])


def check_images(drafter: Drafter, images: bool) -> None:
    """Raise UserError for a drafter that cannot read conversations with images. images: whether there are any."""
    if images and (not drafter.images or drafter.adapts is not None):
        reason = "adapts its target" if drafter.images else "reads text alone"
        raise UserError(
            f"there are images in the data or the prompts, and this drafter {reason}; choose a family that docs/images.md "
            "lists, or leave the images out"
        )


def trainable(drafter: nn.Module) -> int:
    """Parameters that are trained."""
    return sum(p.numel() for p in drafter.parameters() if p.requires_grad)


def confidence_of(logits_V: Tensor) -> Tensor:
    """[...] the logit log(p / (1 - p)) of the likeliest token's probability p."""
    log_p = logits_V.float().amax(-1) - logits_V.float().logsumexp(-1)
    return log_p - (-torch.expm1(log_p.clamp_max(-DOUBT))).log()


@dataclass(frozen=True, slots=True)
class Candidates:
    """The tokens that a drafter's logits are of, where these are not of the whole vocabulary. No others are ever drafted.

    They ascend in every row: the lower token comes first among equals, and sampling goes through them in the same order.
    """

    token_BKC: Tensor  # of each draft
    vocab: int  # V


def draft_chain(
    root_B: Tensor,
    logits_BV: Tensor,
    advance: Callable[[Tensor], Tensor],
    steps: int,
    sampling: Sampling,
    position_B: Tensor,
    among: Candidates | None = None,
) -> DraftTree:
    """A chain of `steps` drafts below the root: argmax when greedy, else sampled from q, which the tree carries.

    logits_BV: for the first draft. advance: token_B of the last draft -> logits for the next. position_B: of the root. among:
    what the logits are of, [B, C] then. With `sampling.shared_noise` a draft is sampled with the noise that the acceptance
    policy will use at its position.
    """
    sampling, tokens, used_logits = sampling.drafting, [root_B], list[Tensor]()
    unfiltered = replace(sampling, top_k=0, top_p=1.0, min_p=0.0)  # what is left to do with shaped logits
    for step in range(steps):
        if step:
            logits_BV = advance(tokens[-1])
        if not sampling.greedy:
            logits_BV = shaped(logits_BV, sampling)
            used_logits.append(logits_BV)
        if sampling.shared_noise:
            token_B = sample(logits_BV, unfiltered, position_B + step + 1, Lane.TARGET)
        else:
            token_B = sample(logits_BV, unfiltered, position_B, Lane.DRAFT, draw=step)
        tokens.append(token_B if among is None else among.token_BKC[:, step].gather(1, token_B[:, None])[:, 0])
    if not used_logits:
        return DraftTree.chain(torch.stack(tokens, 1))
    q_BNV = distribution(torch.stack([*used_logits, used_logits[-1]], 1), unfiltered)
    if among is not None:
        token_BNC = torch.cat([among.token_BKC[:, :steps], among.token_BKC[:, steps - 1 : steps]], 1)
        q_BNV = over_vocabulary(q_BNV, token_BNC, among.vocab, 0.0)
    return DraftTree.chain(torch.stack(tokens, 1), q_BNV=q_BNV)
