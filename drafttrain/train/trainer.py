"""The loop: batch, frozen target, drafter, one optimiser step; then checkpoints that a killed run goes on from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafttrain.core.errors import Interrupted, UserError
from drafttrain.core.files import atomic_directory
from drafttrain.core.intervals import accepted_length, said, tau_interval
from drafttrain.core.tree import arrivals, step_sums
from drafttrain.data.dataset import Dataset, check_supervised, collate, shard, token_counts
from drafttrain.decoding.tree_size import best_nodes
from drafttrain.drafters.checkpoint import CheckpointMeta, TargetRecord, adapter_state, checkpoint_name, filled
from drafttrain.features.cached import Cached
from drafttrain.features.online import Online
from drafttrain.features.prefetch import Prefetch
from drafttrain.model.batch import TrainBatch
from drafttrain.model.drafter import Drafter
from drafttrain.objective.lora_target import AdaptedObjective, rate_scale
from drafttrain.objective.losses import LossOptions, Objective, StepCounts, teacher_forced
from drafttrain.targets.adapt import Adapter
from drafttrain.targets.load import LoadedTarget
from drafttrain.train import DeepSpeedOptions, TrainOptions
from drafttrain.train.checkpoint_manager import CheckpointManager, Progress, save_settings
from drafttrain.train.engine import TrainingEngine, World
from drafttrain.train.interrupt import Interrupt
from drafttrain.train.logger import Logger
from drafttrain.train.onpolicy import OnPolicy
from drafttrain.train.profile import Profile, window
from drafttrain.train.progress import Console, RunningMeans
from drafttrain.train.schedule import learning_rate
from drafttrain.train.telemetry import Meter, StepCost
from drafttrain.train.ulysses import sequence_group
from drafttrain.train.watchdog import Watchdog


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """What is trained on what. options: the family's own, for the checkpoint. nodes: a tree's budget; None: as many as pay.
    adapter: of a target that is trained too. start: weights to begin with instead of the family's own.
    features: where the target's states come from; None: from the target, in every step. look: a small measurement of the
    drafter as it is, on the first process, every `look_every` steps and at each checkpoint.
    """

    loaded: LoadedTarget
    drafter: Drafter
    family: str
    options: dict[str, Any]
    data: Dataset
    train: TrainOptions
    deepspeed: DeepSpeedOptions
    loss: LossOptions
    nodes: int | None
    adapter: Adapter | None = None
    start: dict[str, Tensor] | None = None
    prefetch: bool = False
    features: Online | Cached | None = None
    quick_measure: Callable[[Drafter], dict[str, float]] | None = None
    quick_measure_every: int = 0


@dataclass(frozen=True, slots=True)
class StepBatches:
    """One step's batches of this process, or its parts of them, and the number of tokens that all processes read in it."""

    micro: list[TrainBatch]
    tokens: int


OUT_OF_REACH = 2**31
FOLDS = 4  # of held-out texts


class Trainer:
    """Trains `job` in `run_dir`; the checkpoints lie in its `checkpoints` folder."""

    def __init__(self, job: TrainingJob, world: World, run_dir: Path, resumed: Path | None = None) -> None:
        """resumed: the checkpoint to go on from."""
        self.job, self.world, self.run_dir = job, world, run_dir
        self.device = job.loaded.target.device
        job.drafter.to(self.device)
        if job.train.activation_checkpointing:
            job.drafter.recompute()
        job.drafter.prepare(lambda: token_counts(job.data.train, job.loaded.target.shape.vocab_size))
        if job.start is not None:  # after the family has prepared itself from the data: the start has what it needs
            job.drafter.load_state_dict(job.start)
        self.features = job.features or Online(job.adapter.target if job.adapter else job.loaded.target, job.drafter.taps)
        self.prefetch = Prefetch(self._states, self.device)
        self._next: tuple[int, StepBatches] | None = None
        self._tuned: int | None = None  # the step whose proposal has been fitted
        self.engine = TrainingEngine(objective_of(job), job.train, job.deepspeed, world, job.adapter)
        self.group = sequence_group(job.train, world)
        self.on_policy = OnPolicy(job.drafter, job.loaded.target.stop_ids, job.train, world)
        self.checkpoints = CheckpointManager(
            run_dir / "checkpoints", world, self.engine, tensor_names(job), job.train.keep_last
        )
        self.meter = Meter(self.device)
        self.progress = self.checkpoints.resume(resumed) if resumed else Progress()

    def train(self, logger: Logger | None, console: Console, interrupt: Interrupt | None = None) -> Progress:
        """All steps that are left. logger: on rank 0 alone. Raises Interrupted, after a checkpoint, when that is asked for."""
        options, progress, say = self.job.train, self.progress, console.say
        first = progress.step
        if self.job.drafter.starts_usable and first == 0 and not (self.checkpoints.folder / checkpoint_name(0)).exists():
            self._checkpoint(say)  # what distillation is to be compared with
        with ExitStack() as stack:
            if isinstance(self.features, Cached):
                stack.callback(self.features.close)
            watchdog = stack.enter_context(Watchdog(self.run_dir / "logs", self.world.rank, options.hang_timeout, say))
            trace = stack.enter_context(Profile(window(options.profile, first, options.steps), self._trace_file(), say))
            bar = stack.enter_context(console.bar(options.steps, first))
            self.meter.pause()
            running = RunningMeans()
            for step in range(first, options.steps):
                with trace.step(step + 1):
                    values, tokens, stop = self._step(step, interrupt is not None and interrupt.requested)
                progress.step, progress.loss, progress.tokens = step + 1, values["loss"], progress.tokens + tokens
                values |= running.step(values) | self._cost(tokens) | self._quick_measure(step + 1)
                if logger is not None:
                    logger.step(step + 1, values)
                bar.step(step + 1, tokens, values, line=(step + 1) % options.log_every == 0)
                self._keep(say, stop)
                watchdog.alive()
        return progress

    def _quick_measure(self, step: int) -> dict[str, float]:
        """What a small measurement says of the drafter now, where one is due."""
        options, quick_measure = self.job.train, self.job.quick_measure
        self.progress.measured_tau = None
        due = (
            step % options.checkpoint_every == 0
            or step == options.steps
            or step % (self.job.quick_measure_every or step + 1) == 0
        )
        if quick_measure is None or not due:
            return {}
        weights = self.engine.whole_state(self.checkpoints.names.values())
        found: dict[str, float] = {}
        self._tune()
        if self.world.first:
            state = {name: weights[inner] for name, inner in self.checkpoints.names.items()}
            with torch.random.fork_rng(
                [self.device] if self.device.type == "cuda" else []
            ):  # training goes on as if nobody had looked
                found = quick_measure(filled(self.run_dir, meta_of(self.job, step), self.job.loaded.target, state))
        found = dict(self.world.share(found))
        self.progress.measured_tau = found["measured_tau"]
        self.meter.pause()
        return found

    def _keep(self, say: Callable[[str], None], stop: bool) -> None:
        """A checkpoint where one is due, or the way out. Raises Interrupted there, and UserError where the last has no room."""
        step, options = self.progress.step, self.job.train
        due = step % options.checkpoint_every == 0 or step == options.steps
        if not due and not stop:
            return
        saved = self._checkpoint(say, passing=not due)
        if stop:
            raise Interrupted(f"after step {step} of {options.steps}" + (", which is saved" if saved else ""), together=True)
        if not saved and step == options.steps:
            raise UserError(
                f"disk full while saving the last checkpoint to {self.checkpoints.folder}; free some of it and repeat with "
                "resume=auto, which goes on from the one before"
            )

    def _cost(self, tokens: int) -> dict[str, Any]:
        cost = self.meter.step()
        self._spend(cost)
        values = {"tokens_per_s": tokens / cost.seconds} | cost.values()
        if self.job.train.per_rank and self.progress.step % self.job.train.log_every == 0:
            costs = [asdict(other) for other in self.world.gather(cost)]
            values |= {f"{name}_by_rank": [c[name] for c in costs] for name in costs[0]}
        return values

    def _spend(self, cost: StepCost) -> None:
        """Add a step to what training has cost; processes work alike, so one's operations stand for each. On a CPU our compiled
        blocks do part of the work, whose operations nobody counts.
        """
        progress, size = self.progress, self.world.size
        progress.seconds += cost.seconds
        progress.process_seconds += cost.seconds * size
        progress.flops += cost.flops * size if self.device.type == "cuda" else 0.0
        progress.device = self.device.type

    def _trace_file(self) -> Path | None:
        """Of the first process, or of each."""
        own = self.world.first or self.job.train.per_rank
        return self.run_dir / f"trace-rank{self.world.rank}.json.gz" if own else None

    def _step(self, step: int, stop_requested: bool = False) -> tuple[dict[str, Any], int, bool]:
        """One optimiser step; its figures over all processes, the number of tokens it read, and whether any process was asked
        to stop."""
        options, progress = self.job.train, (step + 1) / self.job.train.steps
        batches = self._step_batches(step)
        own = torch.tensor([sum(b.supervised() for b in batches.micro)], device=self.device)
        supervised = int(self.world.sum(own))
        check_supervised(supervised, step + 1)
        total, counted = torch.zeros(1, dtype=torch.float64, device=self.device), None
        for i, batch in enumerate(batches.micro):
            with self.meter.micro_batch(batch):
                filled = batch.to(self.device) if self.job.adapter else self.prefetch.fill(batch)  # its states need gradients
                self._begin_next(batches.micro[i + 1 :], step)
                loss, counts = self.engine.forward(filled, progress)
                self.engine.backward(loss, supervised)
            total += loss.detach().double()
            counted = counts.packed() if counted is None else counted + counts.packed()
            if i + 1 < len(batches.micro):
                self.engine.micro_done()
        rate = learning_rate(options, step)
        adapter = self.job.adapter
        norm = self.engine.step(rate, rate_scale(adapter.spec, progress, options.warmup) if adapter else 1.0)
        assert counted is not None
        loss_sum, stop = self.world.sum(torch.cat([total, torch.full_like(total, stop_requested)])).tolist()
        values = {"loss": loss_sum / supervised} | figures(StepCounts.unpacked(self.world.sum(counted)))
        values |= {"lr": rate, "grad_norm": norm, "supervised_tokens": supervised}
        return values, batches.tokens, stop > 0

    def _states(self, batch: TrainBatch) -> TrainBatch:
        """With the frozen target's: computed, or read from disk."""
        with self.meter.target() if isinstance(self.features, Online) else self.meter.data():
            return self.features.fill(batch)

    def _step_batches(self, step: int) -> StepBatches:
        """A step's batches, built once."""
        if self._next is not None and self._next[0] == step:
            return self._next[1]
        with self.meter.data():
            rows = self.job.data.global_batch(step, self.job.train.global_batch)
        rows = self.on_policy.rows(rows, step)
        with self.meter.data():
            per_sequence = self.job.train.sequence_parallel
            own = shard(
                rows,
                self.world.rank // per_sequence,
                self.world.size // per_sequence,
                self.job.train.micro_batch,
            )
            micro = [self._batch(part) for part in own]
            if self.group is not None:
                micro = [batch.part(self.group, self.job.drafter.ahead) for batch in micro]
            return StepBatches(micro, sum(len(row.token_ids) for row in rows))

    def _begin_next(self, left: list[TrainBatch], step: int) -> None:
        """Begin with the next batch's states, if they are to be: cached ones always. left: batches of this step. Replies of the
        drafter's own model wait for its weights, and the last step has none behind it."""
        job, cached = self.job, self.features if isinstance(self.features, Cached) else None
        if not (job.prefetch or cached) or job.adapter is not None or job.train.on_policy:
            return
        begin = cached.begin if cached else self.prefetch.start
        if left:
            begin(left[0])
        elif step + 1 < job.train.steps:
            self._next = step + 1, self._step_batches(step + 1)
            begin(self._next[1].micro[0])

    def _batch(self, rows: Any) -> TrainBatch:
        pad = self.job.loaded.tokenizer.pad_token_id
        return collate(rows, 0 if pad is None else pad)

    def held_out(self) -> Iterator[TrainBatch]:
        """The conversations set apart, with the target's states."""
        for start in range(0, len(self.job.data.held_out), self.job.train.micro_batch):
            yield self.features.fill(self._batch(self.job.data.held_out[start : start + self.job.train.micro_batch]))

    def _tune(self) -> None:
        """Fit the proposal's shape to held-out ranks; note the expected tau (greedy) it gives."""
        if self._tuned == self.progress.step:
            return
        self._tuned = self.progress.step
        drafter, target = self.job.drafter, self.job.loaded.target
        drafter.eval()
        hits = [teacher_forced(drafter, target, batch) for batch in self.held_out()]
        drafter.train()
        sure = [(h.sure_MK, h.rank_MK == 0, h.mass_MK) for h in hits if h.sure_MK is not None]
        if sure:
            drafter.calibrate(*(torch.cat(column) for column in zip(*sure, strict=True)))
        texts = [text for h in hits for text in h.rank_MK.split(h.length_D)]
        if not target.trees:  # a rank that no path reaches: what is left to choose from is the chain
            texts = [torch.where(text == 0, 0, OUT_OF_REACH) for text in texts]
        if texts:
            sum_C2 = tuned_sums(drafter, texts, (self.job.nodes or self._best_nodes(texts)) if drafter.tunable else 0)
            self.progress.expected_tau, interval = float(accepted_length(sum_C2.sum(0))), tau_interval(sum_C2)
            self.progress.expected_interval = None if interval is None else list(interval)

    def _best_nodes(self, texts: list[Tensor]) -> int:
        """As many as pay on the first process's device; its weights are whole, or `fit` has refused."""
        drafter = self.job.drafter
        drafter.eval()
        found = best_nodes(self.job.loaded.target, drafter, texts) if self.world.first else 0
        drafter.train()
        return int(self.world.share(found))

    def _checkpoint(self, say: Callable[[str], None], passing: bool = False) -> bool:
        """Whether there was room for one. passing: in haste, to be resumed from alone."""
        if not passing:
            self._tune()
        self.progress.passing = passing
        saved = self.checkpoints.save(self.progress, meta_of(self.job, self.progress.step))
        if not passing and (tau := self.progress.expected_tau) is not None:
            interval = self.progress.expected_interval
            figure = said(tau, None if interval is None else (interval[0], interval[1]))
            say(f"step {self.progress.step}: expected tau {figure} on {len(self.job.data.held_out)} held-out conversations")
        if not saved:
            say(
                f"disk full: no checkpoint of step {self.progress.step}, the ones before are kept; "
                f"free space under {self.checkpoints.folder}"
            )
        self.meter.pause()
        return saved


def tuned_sums(drafter: Drafter, texts: list[Tensor], nodes: int) -> Tensor:
    """[texts, 2] drafts accepted and verifications of each text; the drafter is tuned on all of them, where it can be.

    Each text is counted with the tree that the others gave: with a tree that it helped to choose, tau of a few texts comes
    out up to a tenth too high.
    """
    folds = min(FOLDS, len(texts)) if drafter.tunable else 1
    sum_C2 = torch.zeros(len(texts), 2, dtype=torch.float64)
    for fold in range(folds if folds > 1 else 0):
        drafter.tune([text for i, text in enumerate(texts) if i % folds != fold], nodes)
        sum_C2[fold::folds] = step_sums([arrivals(text, drafter.paths()) for text in texts[fold::folds]])
    if drafter.tunable:
        drafter.tune(texts, nodes)
    return sum_C2 if folds > 1 else step_sums([arrivals(text, drafter.paths()) for text in texts])


def tensor_names(job: TrainingJob) -> dict[str, str]:
    """What a checkpoint calls its tensors, and what the engine's module does."""
    drafter = {name: f"drafter.{name}" for name in job.drafter.state_dict()}
    return drafter | {name: name for name in adapter_state(job.adapter)}


def objective_of(job: TrainingJob) -> Objective:
    if job.adapter is not None:
        return AdaptedObjective(job.drafter, job.loaded.target, job.loss, job.adapter)
    return Objective(job.drafter, job.loaded.target, job.loss)


def without_training(job: TrainingJob, world: World, run_dir: Path) -> Progress:
    """The one checkpoint, of step 0, of a drafter that learns nothing: its settings. No engine is started."""
    progress = Progress()
    if world.first:
        with atomic_directory(run_dir / "checkpoints" / checkpoint_name(progress.step)) as aside:
            save_settings(aside, job.drafter.state_dict(), meta_of(job, progress.step), progress)
    world.wait()
    return progress


def meta_of(job: TrainingJob, step: int) -> CheckpointMeta:
    adapter = None if job.adapter is None else asdict(job.adapter.spec)
    return CheckpointMeta(job.family, job.options, job.drafter.decode_settings(), TargetRecord.of(job.loaded), step, adapter)


def figures(counts: StepCounts) -> dict[str, Any]:
    """Logged figures: top-1 agreement and expected acceptance per position, and the chain's expected tau (greedy)."""

    def per(part_K: Tensor, whole_K: Tensor) -> Tensor:
        return part_K / whole_K.clamp_min(1.0)

    alpha_K = per(counts.alive_correct, counts.alive)
    return {
        "agreement": per(counts.correct, counts.total).tolist(),
        "expected_acceptance": per(counts.mass, counts.total).tolist(),
        "expected_tau": 1.0 + float(alpha_K.cumprod(0).sum()),
        "loss_by_position": per(counts.loss, counts.total).tolist(),
    }
