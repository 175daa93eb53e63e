"""A drafter that follows a target which another training loop changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from drafttrain.api.following_options import check_options, check_overrides, options_for, target_of
from drafttrain.cli.main import user_errors
from drafttrain.core.errors import UserError
from drafttrain.core.files import atomic_directory
from drafttrain.drafters.checkpoint import CheckpointMeta, TargetRecord, filled, read_meta, start_weights
from drafttrain.drafters.checkpoint import save_drafter as save_weights
from drafttrain.engines.draft_push import DraftReceiver, PushedDrafter, receiver_of
from drafttrain.export.exporter import CurrentDrafter
from drafttrain.features.online import Online
from drafttrain.features.padded import Recorded, Replay, batch_of, finite_token
from drafttrain.measure.decoding import decoder_of
from drafttrain.model.batch import TrainBatch
from drafttrain.model.drafter import Drafter
from drafttrain.model.target import FINAL, Taps
from drafttrain.objective.losses import Objective
from drafttrain.runs.derived import for_target, from_device, with_values
from drafttrain.runs.options import RunOptions
from drafttrain.runs.placement import built
from drafttrain.targets.frozen_ends import EndsTarget
from drafttrain.targets.load import LoadedTarget
from drafttrain.train.following import FollowingSteps, StepMetrics, group_size, own_modes
from drafttrain.train.optimizer import load_state, packed, save_state, unpacked

RESUME = "online.safetensors"  # optimiser, steps and version, next to the drafter's weights
STRUCTURE = "structure"  # of `state_dict`: what is no tensor, as JSON in bytes
States = Mapping[int, Tensor] | Sequence[Tensor]


class OnlineDrafter:
    """Trains a drafter next to a loop that changes its target: fine-tuning, or reinforcement learning.

    With a model, the drafter reads the model's own embedding, norm and head at every step: it never has stale copies. The
    model, its gradients and modes, torch's random numbers and the grad mode stay as the loop has them. Where torch.distributed
    is initialised, every process calls `step` together, and gradients are averaged over them.

    Args:
        target: The transformers causal LM that the loop trains, as it is or wrapped by DistributedDataParallel, torch.compile
            or peft. Or a path, hub id or configuration: then nothing is run, the states come from the loop's forward pass, and
            the weights of embedding, norm and head from `set_ends` (a directory's are read at once).
        recipe: A recipe as in `drafttrain fit recipe=NAME`, for a new drafter. Or the directory of a checkpoint, whose family,
            options and weights are taken; `load` restores the optimiser too.
        overrides: `KEY=VALUE`, as on the command line: `drafter.heads=4`, `train.lr=1e-4`, `train.precision=bfloat16`,
            `loss.name=lk`. The learning rate is constant, without warm-up. An option without effect here is refused.
        tokenizer: The target's, for `tau` and exports that hold one.
        optimizer: Makes the optimiser from the parameters. None: the recipe's, with its learning rate.
        lag: Fed samples that are more than so many versions old are dropped.
        capacity: Sequences that `feed` keeps, with their states, on the target's device.
        group: Process group over which gradients are averaged. None: all processes.

    Raises:
        UserError: The recipe, an override or the target cannot be used.
    """

    def __init__(
        self,
        target: nn.Module | PreTrainedConfig | str | Path,
        recipe: str | Path,
        overrides: Sequence[str] = (),
        *,
        tokenizer: Any = None,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
        lag: int = 4,
        capacity: int = 256,
        group: Any = None,
    ) -> None:
        with user_errors():
            self.options: RunOptions = options_for(recipe, overrides)
        self.options = with_values(self.options, from_device(self.options))
        check_options(self.options, lag, capacity)
        check_overrides(overrides, target, optimizer is not None)
        self.recipe, self.lag, self.version, self.steps = str(recipe), lag, 0, 0
        self.target = target_of(target, self.options, tokenizer)
        self.options = for_target(self.options, self.target.shape)
        self._make_optimizer, self._group = optimizer, group
        self._replay, self._prepared = Replay(capacity, self.options.train.seed), False
        self._trained: FollowingSteps | None = None
        self._last_seconds = 0.0  # of the last step in a pause
        if not isinstance(self.target, EndsTarget) or self.target.given:
            self._build()

    @property
    def module(self) -> Drafter:
        """The drafter, a torch module with float32 weights."""
        return self._steps.drafter

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimiser, such as for a schedule of your own."""
        return self._steps.optimizer

    @property
    def taps(self) -> Taps:
        """The target's states that the drafter reads: numbers of blocks from 0, and whether the post-norm state."""
        return self.module.taps

    @property
    def _steps(self) -> FollowingSteps:
        if self._trained is None:
            raise UserError(
                "the target was given as shapes alone; give the weights of its embedding, norm and head by set_ends"
            )
        return self._trained

    def _build(self) -> None:
        """Build the drafter with weights that follow from the seed."""
        train, device = self.options.train, self.target.device
        with own_modes(device):
            torch.manual_seed(train.seed)
            module = self._fresh()
            working = None
            if train.precision == "bfloat16":
                working = Objective(self._fresh().to(torch.bfloat16), self._as_target, self.options.loss)
            objective = Objective(module, self._as_target, self.options.loss)
            self._trained = FollowingSteps(objective, working, train, self._make_optimizer, self._group)
            self._trained.refresh()
        if train.init is not None:
            self._load_weights(Path(train.init).expanduser())

    def _fresh(self) -> Drafter:
        module = built(self.options, self._as_target).to(self.target.device)
        if not module.trained or module.adapts is not None:
            fault = "also trains the target" if module.trained else "trains nothing"
            raise UserError(f"{self.recipe} {fault}, so it cannot follow one; choose another recipe")
        return module

    @property
    def _as_target(self) -> Any:
        return self.target

    def states_of(self, hidden_states: Sequence[Tensor]) -> dict[int, Tensor]:
        """The states that the drafter reads, from `output.hidden_states` of the loop's own forward pass.

        Raises:
            UserError: The tuple does not fit the target, or the drafter reads the last block's output, which transformers
                gives after the norm only.
        """
        blocks = self.target.shape.blocks
        if len(hidden_states) != blocks + 1:
            raise UserError(
                f"got {len(hidden_states)} hidden states, the target has {blocks} blocks; give output.hidden_states"
            )
        if blocks - 1 in self.taps.blocks:
            raise UserError(
                f"the drafter reads block {blocks - 1}, whose output is in no output.hidden_states; leave states out, or set "
                "drafter.target_layer_ids to earlier blocks"
            )
        return {block: hidden_states[block + 1] for block in self.taps.blocks} | {FINAL: hidden_states[-1]}

    def step(
        self,
        tokens: Tensor | None,
        states: States | None = None,
        mask: Tensor | None = None,
        *,
        attention: Tensor | None = None,
        version: int | None = None,
    ) -> StepMetrics:
        """Train on one batch: one optimiser step.

        Args:
            tokens: [B, T] token ids, padded on either side. None: this process has no batch this time, others may.
            states: The target's states on these tokens: `output.hidden_states` of transformers, or by number of the block and
                `FINAL` (-1) for the post-norm state, [B, T, H] each. None: the target runs over the tokens without gradients.
            mask: [B, T], nonzero where a token is supervised, such as a reply's. None: all tokens.
            attention: [B, T], nonzero on real tokens, as transformers' `attention_mask`. None: all are.
            version: Of the target's weights, for `feed`'s bound on staleness.

        Returns:
            Loss, expected tau and top-1 agreement, from before the step, over all processes.

        Raises:
            UserError: Shapes do not fit, a sequence is longer than the target's context, or a state is missing.
        """
        steps = self._steps
        self.version = self.version if version is None else version
        with own_modes(self.target.device):
            return self._stepped(steps, [] if tokens is None else [self._batch(tokens, states, mask, attention)])

    def step_on(self, passes: Sequence[Recorded], version: int | None = None) -> StepMetrics:
        """Take one optimiser step on passes that `FollowCallback` recorded, together. Returns as `step`."""
        steps = self._steps
        self.version = self.version if version is None else version
        with own_modes(self.target.device):
            batches = [self._batch(p.token_BT, p.hidden, p.mask_BT, p.attention_BT) for p in passes]
            return self._stepped(steps, batches)

    def feed(
        self,
        tokens: Tensor,
        states: States | None = None,
        mask: Tensor | None = None,
        *,
        attention: Tensor | None = None,
        version: int | None = None,
    ) -> None:
        """Keep a batch for `replay`. Arguments as for `step`; version: of the target that made the states.

        The oldest sequences make room for new ones. Without states, the target runs over a sample when it is drawn.
        """
        self.version = max(self.version, self.version if version is None else version)
        with own_modes(self.target.device):
            batch = self._batch(tokens, states, mask, attention)
            self._replay.add(batch, self.version if version is None else version)

    def replay(self, steps: int | None = None, *, milliseconds: float | None = None) -> list[StepMetrics]:
        """Take optimiser steps on fed samples, `train.micro_batch` random ones each.

        Samples more than `lag` versions old are dropped first. Every process takes as many steps, whatever it holds.

        Args:
            steps: None: one, or with milliseconds as many as there is time for.
            milliseconds: The length of a pause of the loop. A step that would end after it, if it takes as long as the last
                one, is left to the next call: many short pauses give the same steps as one call without them.

        Returns:
            The figures of each step; with an empty buffer nothing is trained.
        """
        self._replay.drop_before(self.version - self.lag)
        metrics: list[StepMetrics] = []
        paused, begun = milliseconds is not None, perf_counter()
        wanted = steps if steps is not None else inf if paused else 1
        while len(metrics) < wanted:
            step_begun = perf_counter()
            if milliseconds is not None and self._steps.any(step_begun - begun + self._last_seconds >= milliseconds / 1000):
                if not metrics:
                    self._last_seconds /= 2  # one slow step, such as the first, must not end the training in short pauses
                break
            with own_modes(self.target.device):
                sample = self._replay.draw(self.options.train.micro_batch)
                metrics.append(self._stepped(self._steps, [] if sample is None else [sample]))
            if paused:
                if self.target.device.type == "cuda":
                    torch.cuda.synchronize(self.target.device)  # or the optimiser's kernels would run after the pause
                self._last_seconds = perf_counter() - step_begun
                if not metrics[-1].supervised:  # no process has anything to learn from
                    break
        return metrics

    @property
    def fed(self) -> int:
        """Sequences that `replay` can draw from."""
        return len(self._replay)

    def set_ends(self, weights: Mapping[str, Tensor], version: int | None = None) -> None:
        """Copy the target's embedding, norm and head, for a target that was given by path or configuration.

        Args:
            weights: By their names in the target's `state_dict()`; it may hold others too.
            version: The version of the target from now on. None: the next one.

        Raises:
            UserError: A weight is missing or of another shape, or the target is a model, whose weights are read directly.
        """
        if not isinstance(self.target, EndsTarget):
            raise UserError("the target is a model, whose current weights are read at every step; leave set_ends out")
        first = not self.target.given
        with own_modes(self.target.device), torch.no_grad():
            self.target.set(weights)
        self.version = self.version + (not first) if version is None else version
        if self._trained is None:
            self._build()

    def prepare(self, counts: Tensor) -> None:
        """Let a drafter with a smaller vocabulary of its own choose it: how often each token occurs, [V].

        Without it the first step's tokens decide. Other families ignore it.
        """
        with own_modes(self.target.device):
            self.module.prepare(lambda: counts)
            self._steps.refresh()
        self._prepared = True

    def draft_weights(self, layout: str = "vllm", dtype: str | None = None) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors as `drafttrain export format=LAYOUT` writes them; they may share memory with the drafter.

        dtype: of the tensors. None: the target's.

        Raises:
            UserError: The stack does not load this drafter.
        """
        return self._current(layout, dtype).weights()

    def push(self, engine: Any) -> None:
        """Give the drafter to a serving engine.

        Args:
            engine: A `vllm.LLM` made with `worker_extension_cls="drafttrain.engines.draft_push.DraftPush"`, a
                `drafttrain.ReloadedDirectory`, or another object with `stack` and `receive`.

        Raises:
            UserError: The engine takes no drafts, or its stack does not load this drafter.
        """
        receiver: DraftReceiver = receiver_of(engine)
        current = self._current(receiver.stack, None)
        receiver.receive(PushedDrafter(self.steps, current.weights, current.write))

    def tau(self, prompts: Sequence[str | Sequence[int]], *, max_new_tokens: int = 64, batch_size: int = 8) -> float:
        """Tokens per decode step on the target of this moment, greedily, the bonus token included.

        Args:
            prompts: Texts, with the chat template where the tokenizer has one, or token ids.
            max_new_tokens: Of each prompt.
            batch_size: Prompts that are decoded together.

        Raises:
            UserError: The target was given as shapes alone, or a text without a tokenizer.
        """
        from drafttrain.api.decoding import tokens_of

        with own_modes(self.target.device), torch.no_grad():
            loaded = self._loaded(self.target.frozen())
            decode = self.options.decode
            decoder = decoder_of(loaded, decode, self._for_decoding(loaded), max_new_tokens=max_new_tokens)
            results = decoder.run([tokens_of(loaded, prompt, True) for prompt in prompts], batch_size).results
        steps = sum(result.verifications for result in results)
        return sum(result.emitted for result in results) / steps if steps else float("nan")

    def save(self, directory: str | Path, *, target: str | None = None) -> Path:
        """Save a checkpoint for `load` and for every command of drafttrain, on the first process.

        Args:
            directory: The directory to make. It appears whole or not at all.
            target: Where the target of this moment is saved, for the record. None: where the model came from.

        Raises:
            UserError: The directory exists.
        """
        path = Path(directory).expanduser()
        if path.exists():
            raise UserError(f"{path} exists; name a directory that does not")
        state = {"optimizer": self.optimizer.state_dict(), "steps": self.steps, "version": self.version}
        with atomic_directory(path) as staging_dir:
            save_weights(staging_dir, self.module.state_dict(), self._meta(target))
            save_state(staging_dir / RESUME, state)
        return path

    def load(self, directory: str | Path) -> None:
        """Go on from a checkpoint of the same family and options: from `save` with the optimiser, from others without.

        Raises:
            UserError: The checkpoint is damaged, or of another drafter.
        """
        path = Path(directory).expanduser()
        if (family := read_meta(path).family) != self.options.drafter.family:
            raise UserError(f"{path} is a drafter of the family {family}, this one {self.options.drafter.family}")
        self._load_weights(path)
        if (path / RESUME).is_file():
            state = load_state(path / RESUME, self.target.device)
            self.optimizer.load_state_dict(state["optimizer"])
            self.steps, self.version = state["steps"], state["version"]

    def state_dict(self, *, buffer: bool = True) -> dict[str, Tensor]:
        """What the next steps follow from, for the loop's own checkpoint: weights, optimiser, counts, and `feed`'s buffer.

        Copies on the host by name: torch.save, safetensors and torch.distributed.checkpoint take them. Weights and optimiser
        are the same on all processes, the buffer is each one's own.

        Args:
            buffer: Whether the sequences of `feed` and the random state of their draws are in it.
        """
        state: dict[str, Any] = {"weights": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        state |= {"decode": self.module.decode_settings(), "replay": self._replay.state_dict() if buffer else None}
        state |= {"steps": self.steps, "version": self.version, "prepared": self._prepared}
        tensors, structure = packed(state)
        return tensors | {STRUCTURE: torch.frombuffer(bytearray(structure.encode()), dtype=torch.uint8)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a `state_dict`: the next steps are those of the drafter that gave it.

        Raises:
            UserError: The state is incomplete, or of a drafter with other weights or another optimiser; nothing is changed.
        """
        steps, module = self._steps, self.module
        try:
            content = unpacked(state[STRUCTURE].cpu().numpy().tobytes(), lambda name: state[name].clone())
        except (KeyError, ValueError) as error:
            raise UserError(f"the state is incomplete ({error}); give all tensors of state_dict(), by its names") from error
        own, given = ({n: list(x.shape) for n, x in w.items()} for w in (module.state_dict(), content["weights"]))
        if unlike := [name for name in own | given if own.get(name) != given.get(name)]:
            name = unlike[0]
            raise UserError(
                f"the state is of another drafter: {name} is {given.get(name)} there and {own.get(name)} here; "
                "make the drafter with the recipe and options that it had"
            )
        try:
            steps.optimizer.load_state_dict(content["optimizer"])
        except ValueError as error:
            raise UserError(
                f"the state is of another optimiser ({error}); make the drafter with the one that it had"
            ) from error
        with own_modes(self.target.device):
            module.load_state_dict(content["weights"])
            module.use_decode_settings(content["decode"])
            steps.refresh()
        self.steps, self.version, self._prepared = content["steps"], content["version"], content["prepared"]
        if content["replay"] is not None:
            self._replay.load_state_dict(content["replay"], self.target.device)

    def _load_weights(self, directory: Path) -> None:
        with own_modes(self.target.device):
            self.module.load_state_dict(start_weights(directory, self.module))
            self.module.use_decode_settings(read_meta(directory).decode)
            self._steps.refresh()
        self._prepared = True

    def _batch(self, tokens: Tensor, states: States | None, mask: Tensor | None, attention: Tensor | None) -> TrainBatch:
        """The batch on the target's device. Tensors of an inference pass become ordinary ones."""
        if tokens.shape[-1] > self.target.shape.max_positions:
            raise UserError(
                f"sequences have {tokens.shape[-1]} positions, the target's context {self.target.shape.max_positions}; cut them"
            )
        hidden = None if states is None else dict(states) if isinstance(states, Mapping) else self.states_of(states)
        required_keys = (self.taps | Taps(final=True)).keys
        if hidden is not None and (missing_keys := [key for key in required_keys if key not in hidden]):
            raise UserError(
                f"the states lack {missing_keys}; give those of {list(required_keys)}, where -1 is the post-norm state"
            )
        hidden = {key: hidden[key] for key in required_keys} if hidden is not None else {}
        dtype = self.target.dtype  # under autocast a pass's states are of another
        batch = batch_of(_plain(tokens), attention, mask, {key: _plain(h).to(dtype) for key, h in hidden.items()})
        return batch.to(self.target.device)

    def _stepped(self, steps: FollowingSteps, batches: Sequence[TrainBatch]) -> StepMetrics:
        if not self._prepared:
            self._prepare_from(batches)
        online = Online(self._as_target, self.taps)
        filled_batches = [batch if batch.hidden else online.fill(batch) for batch in batches]
        metrics = steps.step(filled_batches, lambda: finite_token(self._as_target))
        self.steps += metrics.stepped
        return metrics

    def _prepare_from(self, batches: Sequence[TrainBatch]) -> None:
        vocab = self.target.shape.vocab_size
        counts = torch.zeros(vocab, dtype=torch.long, device=self.target.device)
        for batch in batches:
            counts += batch.token_BT[batch.mask_BT].bincount(minlength=vocab)
        if group_size(self._group) > 1:
            torch.distributed.all_reduce(counts, group=self._group)
        if bool(counts.any()):
            self.prepare(counts)

    def _meta(self, path: str | None = None) -> CheckpointMeta:
        record = TargetRecord.of(self._loaded(self.target, path))
        return CheckpointMeta(
            self.options.drafter.family, asdict(self.options.drafter), self.module.decode_settings(), record, self.steps
        )

    def _loaded(self, target: Any, path: str | None = None) -> LoadedTarget:
        """The target as commands know it."""
        model, dtype = self.target.model, str(self.target.dtype).removeprefix("torch.")
        source = path or str(getattr(model.config, "_name_or_path", "") or "") or "a model in memory"
        description = {"name": "hf", "path": source, "revision": None, "dtype": dtype, "weights": None}
        description["architecture"] = (getattr(model.config, "architectures", None) or [type(model).__name__])[0]
        return LoadedTarget(target, self.target.tokenizer, source, description)

    def _for_decoding(self, loaded: LoadedTarget) -> Drafter:
        return filled(Path("the drafter"), self._meta(), loaded.target, self.module.state_dict()).requires_grad_(False)

    def _current(self, stack: str, dtype: str | None) -> CurrentDrafter:
        loaded = self._loaded(self.target)
        with own_modes(self.target.device), torch.no_grad():
            return CurrentDrafter(
                self.module, self._meta(), loaded, stack, dtype or str(self.target.dtype).removeprefix("torch.")
            )


def _plain(x: Tensor) -> Tensor:
    """A tensor that gradients can flow from: one of an inference pass is copied."""
    return x.clone() if x.is_inference() else x.detach()
