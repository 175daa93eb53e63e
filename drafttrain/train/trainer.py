"""The training loop: batch, frozen target, drafter, optimiser step. It saves checkpoints from which a run can resume."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafttrain.core.errors import Interrupted, UserError
from drafttrain.core.files import atomic_directory
from drafttrain.core.intervals import accepted_length, tau_interval, with_interval
from drafttrain.data.dataset import Dataset, check_supervised, collate, shard, token_counts
from drafttrain.decoding.tree_size import best_nodes
from drafttrain.drafters.checkpoint import (
    CheckpointMeta,
    TargetRecord,
    adapter_state,
    checkpoint_name,
    filled,
    save_drafter,
)
from drafttrain.drafters.common.drafter_lora import add_matrices, name_in_checkpoint
from drafttrain.features.cached import Cached
from drafttrain.features.engine import EngineStates
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
from drafttrain.train.compiled import compile_layers
from drafttrain.train.engine import TrainingEngine, World
from drafttrain.train.engine_measurement import EngineMeasurement, OpenEngine, engine_measurement
from drafttrain.train.interrupt import Interrupt
from drafttrain.train.logger import Logger
from drafttrain.train.onpolicy import OnPolicy
from drafttrain.train.profile import Profile, window
from drafttrain.train.progress import Console, RunningMeans
from drafttrain.train.schedule import learning_rate
from drafttrain.train.telemetry import Meter, StepCost
from drafttrain.train.tree_tuning import tuned_sums
from drafttrain.train.ulysses import sequence_group
from drafttrain.train.watchdog import Watchdog


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """The drafter, target, data and options of a training run."""

    loaded: LoadedTarget
    drafter: Drafter
    family: str
    options: dict[str, Any]  # the family's options, for the checkpoint
    data: Dataset
    train: TrainOptions
    deepspeed: DeepSpeedOptions
    loss: LossOptions
    nodes: int | None  # node budget of a draft tree; None: the fastest on this machine
    adapter: Adapter | None = None  # of a target that is trained too
    start: dict[str, Tensor] | None = None  # initial weights, instead of the family's
    prefetch: bool = False
    features: Online | Cached | EngineStates | None = None  # source of the target's states; None: the target, in every step
    quick_measure: Callable[[Drafter], dict[str, float]] | None = None  # small measurement, on rank 0
    quick_measure_every: int = 0  # steps between small measurements; there is also one at each checkpoint
    open_engine: OpenEngine | None = None  # a serving engine that makes these measurements too
    best_by_engine: bool = False  # whether its tau chooses the best checkpoint


@dataclass(frozen=True, slots=True)
class StepBatches:
    """The batches of one step."""

    micro: list[TrainBatch]  # of this process; with sequence parallelism, its parts of them
    tokens: int  # that all processes read


OUT_OF_REACH = 2**31  # a rank that no path contains


class Trainer:
    """Trains `job`. Checkpoints go to `<run_dir>/checkpoints`."""

    def __init__(self, job: TrainingJob, world: World, run_dir: Path, resumed: Path | None = None) -> None:
        """resumed: the checkpoint to continue from."""
        self.job, self.world, self.run_dir = job, world, run_dir
        self.device = job.loaded.target.device
        job.drafter.to(self.device)
        if job.train.activation_checkpointing:
            job.drafter.recompute()
        job.drafter.prepare(lambda: token_counts(job.data.train, job.loaded.target.shape.vocab_size))
        if job.start is not None:  # after `prepare`, so that these weights win
            job.drafter.load_state_dict(job.start)
        if job.train.lora.rank:
            add_matrices(job.drafter, job.train.lora, job.loaded.target.shape.vocab_size)
        self.features = job.features or Online(job.adapter.target if job.adapter else job.loaded.target, job.drafter.taps)
        self.prefetch = Prefetch(self._states, self.device)
        self._built: dict[int, StepBatches] = {}  # the batches of later steps whose states have begun to be loaded
        self._tuned: int | None = None  # the last step at which the proposal was tuned
        self.engine = TrainingEngine(objective_of(job), job.train, job.deepspeed, world, job.adapter)
        self.group = sequence_group(job.train, world)
        self.on_policy = OnPolicy(job.drafter, job.loaded.target.stop_ids, job.train, world)
        self.checkpoints = CheckpointManager(
            run_dir / "checkpoints", world, self.engine, tensor_names(job), job.train.keep_last, job.best_by_engine
        )
        self.meter = Meter(self.device)
        self.progress = self.checkpoints.resume(resumed) if resumed else Progress()
        self.resumed = resumed

    def train(self, logger: Logger | None, console: Console, interrupt: Interrupt | None = None) -> Progress:
        """Run the remaining steps. logger: on rank 0 only. When interrupted, saves a checkpoint and raises Interrupted."""
        options, progress, say = self.job.train, self.progress, console.say
        first = progress.step
        if options.compile == "on":
            compile_layers(self.job.drafter, say)
        usable = self.job.drafter.starts_usable or options.lora.rank > 0
        if usable and first == 0 and not (self.checkpoints.folder / checkpoint_name(0)).exists():
            self._checkpoint(say)  # the baseline that training is compared with
        with ExitStack() as stack:
            if not isinstance(self.features, Online):
                stack.callback(self.features.close)
            watchdog = stack.enter_context(
                Watchdog(self.run_dir / "logs", self.world.rank, options.hang_timeout, say, ends=self.world.size > 1)
            )
            trace = stack.enter_context(Profile(window(options.profile, first, options.steps), self._trace_file(), say))
            bar = stack.enter_context(console.bar(options.steps, first))
            measurement = engine_measurement(self.job.open_engine, self.run_dir, self.checkpoints, self.world, say)
            in_engine = stack.enter_context(measurement)
            if self.resumed is not None:
                with self._same_random_numbers():
                    in_engine.resume(self.resumed)
            self.meter.pause()
            running = RunningMeans()
            for step in range(first, options.steps):
                with trace.step(step + 1):
                    values, tokens, stop = self._step(step, interrupt is not None and interrupt.requested)
                progress.step, progress.loss, progress.tokens = step + 1, values["loss"], progress.tokens + tokens
                values |= running.step(values) | self._cost(tokens)
                values |= self._collected(in_engine) | self._quick_measure(step + 1, in_engine)
                if logger is not None:
                    logger.step(step + 1, values)
                bar.step(step + 1, tokens, values, line=(step + 1) % options.log_every == 0)
                self._keep(say, stop)
                watchdog.alive()
            if self.job.open_engine is not None:
                in_engine.finish(options.steps, logger, interrupt, watchdog.alive)
        return progress

    def _collected(self, in_engine: EngineMeasurement) -> dict[str, Any]:
        """The figures of a serving engine's measurement of an earlier step, if it has ended."""
        if not in_engine.busy:
            return {}
        with self._same_random_numbers():
            found = in_engine.collected()
        if not in_engine.busy:
            self.meter.pause()
        return found

    def _same_random_numbers(self) -> AbstractContextManager[None]:
        """Measurements inside do not change training's random numbers."""
        return torch.random.fork_rng([self.device] if self.device.type == "cuda" else [])

    def _quick_measure(self, step: int, in_engine: EngineMeasurement) -> dict[str, float]:
        """The figures of a small measurement, if one is due. A serving engine starts its own, if there is one."""
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
            state, meta = {name: weights[inner] for name, inner in self.checkpoints.names.items()}, meta_of(self.job, step)
            with self._same_random_numbers():
                found = quick_measure(filled(self.run_dir, meta, self.job.loaded.target, state))
                in_engine.start(step, lambda directory: save_drafter(directory, state, meta))
        found = dict(self.world.share(found))
        self.progress.measured_tau = found["measured_tau"]
        self.meter.pause()
        return found

    def _keep(self, say: Callable[[str], None], stop: bool) -> None:
        """Save a checkpoint if one is due. stop: save and raise Interrupted. Raises UserError if the last one does not fit."""
        step, options = self.progress.step, self.job.train
        due = step % options.checkpoint_every == 0 or step == options.steps
        if not due and not stop:
            return
        saved = self._checkpoint(say, passing=not due)
        if stop:
            raise Interrupted(f"after step {step} of {options.steps}" + (", which is saved" if saved else ""), together=True)
        if not saved and step == options.steps:
            raise UserError(
                f"disk full while saving the last checkpoint to {self.checkpoints.folder}; free some space and repeat with "
                "resume=auto, which continues from the checkpoint before"
            )

    def _cost(self, tokens: int) -> dict[str, Any]:
        cost = self.meter.step()
        self._spend(cost)
        values = {"tokens_per_s": tokens / cost.seconds} | cost.values()
        if isinstance(self.features, EngineStates):
            values |= self.features.figures(cost.seconds)
        if self.job.train.per_rank and self.progress.step % self.job.train.log_every == 0:
            costs = [asdict(other) for other in self.world.gather(cost)]
            values |= {f"{name}_by_rank": [c[name] for c in costs] for name in costs[0]}
        return values

    def _spend(self, cost: StepCost) -> None:
        """Add a step's cost to the run's. Processes do equal work, so this process's operations count for each.

        On a CPU, operations are not counted: compiled blocks hide part of them.
        """
        progress, size = self.progress, self.world.size
        progress.seconds += cost.seconds
        progress.process_seconds += cost.seconds * size
        progress.flops += cost.flops * size if self.device.type == "cuda" else 0.0
        progress.device = self.device.type

    def _trace_file(self) -> Path | None:
        """The trace file of this process; None if it records nothing."""
        own = self.world.first or self.job.train.per_rank
        return self.run_dir / f"trace-rank{self.world.rank}.json.gz" if own else None

    def _step(self, step: int, stop_requested: bool = False) -> tuple[dict[str, Any], int, bool]:
        """Run one optimiser step.

        Returns its figures over all processes, the number of tokens it read, and whether any process must stop.
        """
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
        """The batch with the frozen target's states, computed, read from disk or received."""
        with self.meter.target() if isinstance(self.features, Online) else self.meter.data():
            return self.features.fill(batch)

    def _step_batches(self, step: int) -> StepBatches:
        """The batches of a step; each step's are built once."""
        if step in self._built:
            return self._built.pop(step)
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
                micro = [batch.part(self.group, self.job.drafter.label_offset) for batch in micro]
            return StepBatches(micro, sum(len(row.token_ids) for row in rows))

    def _begin_next(self, left: list[TrainBatch], step: int) -> None:
        """Start loading, requesting or computing the next batches' states, unless the target computes them when they are due.

        left: batches of this step. On-policy replies cannot be prefetched: they need the weights after this step.
        """
        job, source = self.job, None if isinstance(self.features, Online) else self.features
        if not (job.prefetch or source) or job.adapter is not None or job.train.on_policy:
            return
        for batch in islice(self._coming(left, step), source.ahead if source else 1):
            (source.begin if source else self.prefetch.start)(batch)

    def _coming(self, left: list[TrainBatch], step: int) -> Iterator[TrainBatch]:
        """The micro-batches after the current one, in order, whatever step they belong to."""
        yield from left
        for later in range(step + 1, self.job.train.steps):
            if later not in self._built:
                self._built[later] = self._step_batches(later)
            yield from self._built[later].micro

    def _batch(self, rows: Any) -> TrainBatch:
        pad = self.job.loaded.tokenizer.pad_token_id
        return collate(rows, 0 if pad is None else pad)

    def held_out(self) -> Iterator[TrainBatch]:
        """Batches of the held-out conversations, with the target's states."""
        rows, size = self.job.data.held_out, self.job.train.micro_batch
        batches = [self._batch(rows[start : start + size]) for start in range(0, len(rows), size)]
        for i, batch in enumerate(batches):
            if isinstance(self.features, EngineStates):
                for later in batches[i : i + 1 + self.features.ahead]:
                    self.features.begin(later)
            yield self.features.fill(batch)
        if isinstance(self.features, EngineStates):
            self.features.pause()

    def _tune(self) -> None:
        """Tune the proposal on held-out ranks, and record its expected tau (greedy)."""
        if self._tuned == self.progress.step:
            return
        self._tuned = self.progress.step
        drafter, target = self.job.drafter, self.job.loaded.target
        drafter.eval()
        hits = [teacher_forced(drafter, target, batch) for batch in self.held_out()]
        drafter.train()
        confidences = [(h.confidence_MK, h.rank_MK == 0, h.mass_MK) for h in hits if h.confidence_MK is not None]
        if confidences and drafter.calibration is not None:
            drafter.calibration.fit(*(torch.cat(column) for column in zip(*confidences, strict=True)))
        sequences = [rank_MK for h in hits for rank_MK in h.rank_MK.split(h.length_D)]
        if not target.trees:  # a rank that no path reaches: what is left to choose from is the chain
            sequences = [torch.where(rank_MK == 0, 0, OUT_OF_REACH) for rank_MK in sequences]
        if sequences:
            sum_C2 = tuned_sums(
                drafter, sequences, (self.job.nodes or self._best_nodes(sequences)) if drafter.proposal.tunable else 0
            )
            self.progress.expected_tau, interval = float(accepted_length(sum_C2.sum(0))), tau_interval(sum_C2)
            self.progress.expected_interval = None if interval is None else list(interval)

    def _best_nodes(self, sequences: list[Tensor]) -> int:
        """The fastest number of nodes on rank 0's device. Its weights are whole: `fit` refuses sharded weights before."""
        drafter = self.job.drafter
        drafter.eval()
        found = best_nodes(self.job.loaded.target, drafter, sequences) if self.world.first else 0
        drafter.train()
        return int(self.world.share(found))

    def _checkpoint(self, say: Callable[[str], None], passing: bool = False) -> bool:
        """Save a checkpoint; False if the disk is full. passing: at an interruption, only for resuming, without tuning."""
        if not passing:
            self._tune()
        self.progress.passing = passing
        saved = self.checkpoints.save(self.progress, meta_of(self.job, self.progress.step))
        if not passing and (tau := self.progress.expected_tau) is not None:
            interval = self.progress.expected_interval
            figure = with_interval(tau, None if interval is None else (interval[0], interval[1]))
            say(f"step {self.progress.step}: expected tau {figure} on {len(self.job.data.held_out)} held-out conversations")
        if not saved:
            say(
                f"disk full: no checkpoint of step {self.progress.step}; the earlier ones are kept; "
                f"free space under {self.checkpoints.folder}"
            )
        self.meter.pause()
        return saved


def tensor_names(job: TrainingJob) -> dict[str, str]:
    """Names of the tensors in the engine's module, by their names in a checkpoint."""
    own = name_in_checkpoint if job.train.lora.rank else str
    drafter = {own(name): f"drafter.{name}" for name in job.drafter.state_dict()}
    return drafter | {name: name for name in adapter_state(job.adapter)}


def objective_of(job: TrainingJob) -> Objective:
    """The training objective; with an adapter, it trains the target too."""
    if job.adapter is not None:
        return AdaptedObjective(job.drafter, job.loaded.target, job.loss, job.adapter)
    return Objective(job.drafter, job.loaded.target, job.loss)


def without_training(job: TrainingJob, world: World, run_dir: Path) -> Progress:
    """Write the only checkpoint of a drafter that is not trained: its settings, at step 0."""
    progress = Progress()
    if world.first:
        with atomic_directory(run_dir / "checkpoints" / checkpoint_name(progress.step)) as aside:
            save_settings(aside, job.drafter.state_dict(), meta_of(job, progress.step), progress)
    world.wait()
    return progress


def meta_of(job: TrainingJob, step: int) -> CheckpointMeta:
    """The metadata of a checkpoint."""
    adapter = None if job.adapter is None else asdict(job.adapter.spec)
    lora = asdict(job.train.lora) if job.train.lora.rank else None
    settings, target = job.drafter.decode_settings(), TargetRecord.of(job.loaded)
    return CheckpointMeta(job.family, job.options, settings, target, step, adapter, lora=lora)


def figures(counts: StepCounts) -> dict[str, Any]:
    """The figures to log: top-1 agreement, expected acceptance and loss by position, and a chain's expected tau (greedy)."""

    def per(part_K: Tensor, whole_K: Tensor) -> Tensor:
        return part_K / whole_K.clamp_min(1.0)

    alpha_K = per(counts.alive_correct, counts.alive)
    return {
        "agreement": per(counts.correct, counts.total).tolist(),
        "expected_acceptance": per(counts.mass, counts.total).tolist(),
        "expected_tau": 1.0 + float(alpha_K.cumprod(0).sum()),
        "loss_by_position": per(counts.loss, counts.total).tolist(),
    }
