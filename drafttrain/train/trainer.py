"""The training loop: batch, frozen target, drafter, optimiser step. It saves checkpoints from which a run can resume."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from drafttrain.core.errors import Interrupted, UserError
from drafttrain.core.files import atomic_directory
from drafttrain.core.intervals import accepted_length, tau_interval, with_interval
from drafttrain.core.tree import arrivals, step_sums
from drafttrain.data.dataset import check_supervised, token_counts
from drafttrain.decoding.tree_size import best_nodes
from drafttrain.drafters.checkpoint import (
    checkpoint_name,
    filled,
    list_checkpoints,
    save_drafter,
    step_of,
)
from drafttrain.drafters.common.drafter_lora import add_matrices
from drafttrain.features.engine import EngineStates
from drafttrain.features.online import Online
from drafttrain.model.batch import moved
from drafttrain.model.drafter import Drafter
from drafttrain.objective.lora_target import rate_scale
from drafttrain.objective.losses import fit_tree_confidence, teacher_forced
from drafttrain.train.checkpoint_manager import CheckpointManager, Progress, save_settings
from drafttrain.train.compiled import compile_layers
from drafttrain.train.engine import TrainingEngine, World
from drafttrain.train.engine_measurement import EngineMeasurement, engine_measurement
from drafttrain.train.interrupt import Interrupt, Watchdog
from drafttrain.train.job import TrainingJob, meta_of, objective_of, tensor_names
from drafttrain.train.logger import LateLog, Logger, StepResult, ToHost
from drafttrain.train.optimizer import learning_rate
from drafttrain.train.progress import Console
from drafttrain.train.step_batches import Batches, StepBatches
from drafttrain.train.telemetry import Meter, Profile, StepCost, window

OUT_OF_REACH = 2**31  # a rank that no path contains
LEFT_OUT, NAMED = "left_out.txt", 20  # records that steps left out: the file that names them, how many the console names
FOLDS = 4  # cross-validation folds of the held-out sequences


class Trainer:
    """Trains `job`. Checkpoints go to `<run_dir>/checkpoints`."""

    def __init__(
        self, job: TrainingJob, world: World, run_dir: Path, resumed: Path | None = None, first_steps: int | None = None
    ) -> None:
        """resumed: the checkpoint to continue from. first_steps: of a run that was lengthened, as for `learning_rate`."""
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
        target = job.adapter.target if job.adapter else job.loaded.target
        self.features = job.features or Online(target, job.drafter.taps, job.loaded.adapters)
        self._tuned: int | None = None  # the last step at which the proposal was tuned
        self._named = set[str]()  # records that are left out of steps
        self._supervised: int | None = None  # supervised tokens of the next step in all processes; None: not counted yet
        self.engine = TrainingEngine(objective_of(job), job.train, job.deepspeed, world, job.adapter)
        self.checkpoints = CheckpointManager(
            run_dir / "checkpoints", world, self.engine, tensor_names(job), job.train.keep_last, job.best_by_engine
        )
        self.meter = Meter(self.device)
        self.batches = Batches(job, world, self.features, self.meter)
        self.progress = self.checkpoints.resume(resumed) if resumed else Progress()
        self.resumed, self.first_steps = resumed, first_steps

    def train(self, logger: Logger | None, console: Console, interrupt: Interrupt | None = None) -> Progress:
        """Run the remaining steps. logger: on rank 0 only. When interrupted, saves a checkpoint and raises Interrupted."""
        options, progress, notify = self.job.train, self.progress, console.say
        first_step = progress.step
        if options.compile == "on":
            compile_layers(self.job.drafter, notify)
        usable = self.job.drafter.starts_usable or options.lora.rank > 0
        if usable and first_step == 0 and not (self.checkpoints.folder / checkpoint_name(0)).exists():
            self._checkpoint(notify)  # the baseline that training is compared with
        with ExitStack() as stack:
            if not isinstance(self.features, Online):
                stack.callback(self.features.close)
            watchdog = stack.enter_context(
                Watchdog(self.run_dir / "logs", self.world.rank, options.hang_timeout, notify, ends=self.world.size > 1)
            )
            trace = stack.enter_context(Profile(window(options.profile, first_step, options.steps), self._trace_file(), notify))
            bar = stack.enter_context(console.bar(options.steps, first_step))
            measurement_context = engine_measurement(self.job.open_engine, self.run_dir, self.checkpoints, self.world, notify)
            measurement = stack.enter_context(measurement_context)
            if self.resumed is not None:
                with self._same_random_numbers():
                    measurement.resume(self.resumed)
            self.meter.pause()
            log = LateLog(progress, logger, bar, options.log_every)
            stack.callback(log.flush)

            def meanwhile() -> bool:
                log.flush()
                return interrupt is not None and interrupt.requested

            for step in range(first_step, options.steps):
                with trace.step(step + 1):
                    result = self._step(step, notify, meanwhile)
                progress.step, progress.tokens = step + 1, progress.tokens + result.tokens
                log.add(step + 1, result, self._cost(result.tokens))
                log.more |= self._collected(measurement) | self._quick_measure(step + 1, measurement)
                if result.stop or self._due() or log.bad >= options.bad_steps:
                    log.flush()  # a checkpoint has the loss of its step
                    self._keep(notify, result.stop, log.bad)
                watchdog.alive()
            if progress.left_out:
                notify(f"left out of steps: {progress.left_out:,} rows, because a value was not finite ({LEFT_OUT})")
            if self.job.open_engine is not None:
                measurement.finish(options.steps, logger, interrupt, watchdog.alive)
        return progress

    def _collected(self, measurement: EngineMeasurement) -> dict[str, Any]:
        """The figures of a serving engine's measurement of an earlier step, if it has ended."""
        if not measurement.busy:
            return {}
        with self._same_random_numbers():
            figures = measurement.collected()
        if not measurement.busy:
            self.meter.pause()
        return figures

    def _same_random_numbers(self) -> AbstractContextManager[None]:
        """Measurements inside do not change training's random numbers."""
        return torch.random.fork_rng([self.device] if self.device.type == "cuda" else [])

    def _quick_measure(self, step: int, measurement: EngineMeasurement) -> dict[str, float]:
        """The figures of a small measurement, if one is due. A serving engine starts its own, if there is one."""
        quick_measure = self.job.quick_measure
        self.progress.measured_tau = None
        is_due = self._due() or step % (self.job.quick_measure_every or step + 1) == 0
        if (quick_measure is None and self.job.open_engine is None) or not is_due:
            return {}
        weights = self.engine.whole_state(self.checkpoints.names.values())
        figures: dict[str, float] = {}
        self._tune()
        if self.world.first:
            state, meta = {name: weights[key] for name, key in self.checkpoints.names.items()}, meta_of(self.job, step)
            with self._same_random_numbers():
                if quick_measure is not None:
                    figures = quick_measure(filled(self.run_dir, meta, self.job.loaded.target, state))
                measurement.start(step, lambda directory: save_drafter(directory, state, meta))
        figures = dict(self.world.share(figures))
        self.progress.measured_tau = figures.get("measured_tau")
        self.meter.pause()
        return figures

    def _due(self) -> bool:
        """Whether a checkpoint is due after this step."""
        step, options = self.progress.step, self.job.train
        return step % options.checkpoint_every == 0 or step == options.steps

    def _keep(self, notify: Callable[[str], None], stop: bool, bad: int) -> None:
        """Save a checkpoint. stop: raise Interrupted, too. bad: steps in a row that changed nothing.

        Raises UserError for too many of them, and if the last checkpoint does not fit.
        """
        step, options = self.progress.step, self.job.train
        if bad >= options.bad_steps:
            self._end_bad(bad, notify)
        saved = self._checkpoint(notify, passing=not self._due())
        if stop:
            raise Interrupted(f"after step {step} of {options.steps}" + (", which is saved" if saved else ""), together=True)
        if not saved and step == options.steps:
            raise UserError(
                f"disk full while saving the last checkpoint to {self.checkpoints.folder}; free some space and repeat with "
                "resume=auto, which continues from the checkpoint before"
            )

    def _end_bad(self, bad: int, notify: Callable[[str], None]) -> NoReturn:
        """End a run whose last `bad` steps changed nothing. The weights of the last good step are saved, unless they are."""
        step, folder = self.progress.step, self.checkpoints.folder
        last = self.world.share(max((step_of(path) for path in list_checkpoints(folder)), default=0))
        if step - bad > last:
            self._checkpoint(notify)
        saved = f"; {folder} has the weights from before" if step > bad else ""
        raise UserError(
            f"steps {step - bad + 1} to {step} changed nothing, because no gradient was finite{saved}; lower train.lr, set "
            "train.precision=float32, or look at the target and the data (train.bad_steps sets how many may follow one another)"
        )

    def _cost(self, tokens: int) -> dict[str, Any]:
        cost = self.meter.step()
        self._spend(cost)
        values = {"tokens_per_s": tokens / cost.seconds} | cost.values()
        if isinstance(self.features, EngineStates):
            values |= self.features.figures(cost.seconds)
        if self.job.train.per_rank and self.progress.step % self.job.train.log_every == 0:
            costs = [asdict(rank_cost) for rank_cost in self.world.gather(cost)]
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
        is_traced = self.world.first or self.job.train.per_rank
        return self.run_dir / f"trace-rank{self.world.rank}.json.gz" if is_traced else None

    def _step(self, step: int, notify: Callable[[str], None], meanwhile: Callable[[], bool]) -> StepResult:
        """Run one optimiser step, without the rows that have a value which is not finite.

        A step with such a row changes nothing, and is tried again without it, so that other steps need no wait.
        """
        batches = self.batches.of(step)
        while True:
            result, by_states, by_scores = self._tried(step, batches, meanwhile)
            remaining_rows = self.job.train.global_batch - len(batches.left_out | by_states)
            if len(by_scores) == remaining_rows > 1:  # no row's fault: the drafter's own states or weights have overflowed
                by_scores = frozenset()
            if not by_states | by_scores:
                self.progress.left_out += result.left_out
                return result
            self.batches.remember(step, by_states)
            self._name(self.batches.origins(step, by_states), "the target's states are not finite", notify)
            self._name(self.batches.origins(step, by_scores), "its loss is not finite", notify)
            batches, self._supervised = self.batches.without(batches, by_states | by_scores), None

    def _name(self, records: list[str], cause: str, notify: Callable[[str], None]) -> None:
        """Name records that are left out, each once: in left_out.txt, the first ones on the console too."""
        new_records = [record for record in records if record not in self._named]
        self._named.update(new_records)
        if not new_records or not self.world.first:
            return
        with suppress(OSError), (self.run_dir / LEFT_OUT).open("a+", encoding="utf-8") as file:  # as where the disk is full
            file.seek(0)
            written_lines = set(file)  # before the run was resumed
            file.writelines(line for record in new_records if (line := f"{record}: {cause}\n") not in written_lines)
        free_lines = NAMED - (len(self._named) - len(new_records))
        for record in new_records[: max(0, free_lines)]:
            notify(f"{record}: left out, because {cause}")
        if len(new_records) >= free_lines > 0:
            notify(f"{LEFT_OUT} in {self.run_dir} names further ones")

    def _tried(
        self, step: int, batches: StepBatches, meanwhile: Callable[[], bool]
    ) -> tuple[StepResult, frozenset[int], frozenset[int]]:
        """(the step, places of the global batch with states that are not finite, and with losses that are not).

        On a GPU nothing waits for the device before the gradients are there. Until then it works alone: the next step's batches
        are made and counted, and `meanwhile` is called, which returns whether this process must stop.
        """
        options, progress = self.job.train, (step + 1) / self.job.train.steps
        if self._supervised is None:
            self._supervised = int(self.world.sum(moved(torch.tensor([batches.supervised()]), self.device)))
        supervised = self._supervised
        if not batches.left_out:
            check_supervised(supervised, step + 1)
        elif not supervised:
            return self._nothing_left(step, batches, meanwhile), frozenset(), frozenset()
        total, counted, fault_2B = self._gradients(step, batches, supervised)
        next_batches = self.batches.ahead(step + 1)
        local_flags = torch.tensor([next_batches.supervised() if next_batches else 0, meanwhile()])
        global_flags = self.world.sum(torch.cat([moved(local_flags, self.device), self.batches.by_place(fault_2B).flatten()]))
        host_flags, is_refused = ToHost(global_flags), global_flags[len(local_flags) :].any()
        rate = learning_rate(options, step, self.first_steps)
        adapter = self.job.adapter
        norm = self.engine.step(rate, rate_scale(adapter.spec, progress, options.warmup) if adapter else 1.0, is_refused)
        sums = ToHost(self.world.sum(total), self.world.sum(counted), norm)
        next_supervised, stop, *faults = host_flags.read()[0].tolist()
        self._supervised = next_supervised if next_batches else None
        result = StepResult(sums, supervised, rate, batches.tokens, stop > 0, len(batches.left_out), any(faults))
        return result, *_places(faults)

    def _gradients(self, step: int, batches: StepBatches, supervised: int) -> tuple[Tensor, Tensor, Tensor]:
        """(sum of the losses, counts [6, K], rows [2, B] with values that are not finite) of this process's micro-batches."""
        progress, adapter = (step + 1) / self.job.train.steps, self.job.adapter
        total, counted, faults = torch.zeros(1, dtype=torch.float64, device=self.device), list[Tensor](), list[Tensor]()
        for i, batch in enumerate(batches.micro):
            with self.meter.micro_batch(batch):
                filled_batch = batch.to(self.device) if adapter else self.batches.filled(batch)  # its states need gradients
                self.batches.begin_next(batches.micro[i + 1 :], step)
                loss, counts = self.engine.forward(filled_batch, progress)
                self.engine.backward(loss, supervised)
            total += loss.detach().double()
            counted.append(counts.packed() if i == 0 else counted.pop() + counts.packed())
            faults.append(counts.nonfinite_2B)
            if i + 1 < len(batches.micro):
                self.engine.micro_done()
        return total, counted[0], torch.cat(faults, 1)

    def _nothing_left(self, step: int, batches: StepBatches, meanwhile: Callable[[], bool]) -> StepResult:
        """A step whose rows are all left out. It changes nothing."""
        stop = self.world.sum(moved(torch.tensor([int(meanwhile())]), self.device))
        self._supervised = None
        counted = torch.zeros(6, self.job.drafter.proposal.predicted_depths, dtype=torch.float64)
        sums = ToHost(torch.zeros(1), counted, torch.tensor(torch.nan))
        rate = learning_rate(self.job.train, step, self.first_steps)
        return StepResult(sums, 0, rate, batches.tokens, bool(stop), len(batches.left_out), True)

    def _tune(self) -> None:
        """Tune the proposal on held-out ranks, and record its expected tau (greedy)."""
        if self._tuned == self.progress.step:
            return
        self._tuned = self.progress.step
        drafter, target = self.job.drafter, self.job.loaded.target
        drafter.eval()
        hits = [teacher_forced(drafter, target, batch) for batch in self.batches.held_out()]
        drafter.train()
        confidences = [(h.confidence_MK, h.rank_MK == 0, h.acceptance_MK) for h in hits if h.confidence_MK is not None]
        if confidences and drafter.calibration is not None:
            drafter.calibration.fit(*(torch.cat(column) for column in zip(*confidences, strict=True)))
        fit_tree_confidence(drafter, hits)
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
        nodes = best_nodes(self.job.loaded.target, drafter, sequences) if self.world.first else 0
        drafter.train()
        return int(self.world.share(nodes))

    def _checkpoint(self, notify: Callable[[str], None], passing: bool = False) -> bool:
        """Save a checkpoint; False if the disk is full. passing: at an interruption, only for resuming, without tuning."""
        if not passing:
            self._tune()
        self.progress.passing = passing
        saved = self.checkpoints.save(self.progress, meta_of(self.job, self.progress.step))
        if not passing and (tau := self.progress.expected_tau) is not None:
            interval = self.progress.expected_interval
            figure = with_interval(tau, None if interval is None else (interval[0], interval[1]))
            notify(f"step {self.progress.step}: expected tau {figure} on {len(self.job.data.held_out)} held-out conversations")
        if not saved:
            notify(
                f"disk full: no checkpoint of step {self.progress.step}; the earlier ones are kept; "
                f"free space under {self.checkpoints.folder}"
            )
        self.meter.pause()
        return saved


def _places(fault_2R: list[int]) -> tuple[frozenset[int], frozenset[int]]:
    """Places with states that are not finite, and others with scores that are not. fault_2R: flattened."""
    size = len(fault_2R) // 2
    by_states, by_scores = (frozenset(p for p in range(size) if fault_2R[offset + p]) for offset in (0, size))
    return by_states, by_scores - by_states


def without_training(job: TrainingJob, world: World, run_dir: Path) -> Progress:
    """Write the only checkpoint of a drafter that is not trained: its settings, at step 0."""
    progress = Progress()
    if world.first:
        with atomic_directory(run_dir / "checkpoints" / checkpoint_name(progress.step)) as staging_dir:
            save_settings(staging_dir, job.drafter.state_dict(), meta_of(job, progress.step), progress)
    world.wait()
    return progress


def tuned_sums(drafter: Drafter, sequences: list[Tensor], nodes: int) -> Tensor:
    """[sequences, 2] accepted drafts and verifications of each sequence. A tunable drafter ends up tuned on all sequences.

    Each sequence is counted with a tree tuned on the other ones (cross-validation). With a tree tuned on the sequence itself,
    tau of a few sequences would be up to a tenth too high.
    """
    folds = min(FOLDS, len(sequences)) if drafter.proposal.tunable else 1
    sum_C2 = torch.zeros(len(sequences), 2, dtype=torch.float64)
    for fold in range(folds if folds > 1 else 0):
        drafter.proposal.tune([rank_MK for i, rank_MK in enumerate(sequences) if i % folds != fold], nodes)
        sum_C2[fold::folds] = step_sums([arrivals(rank_MK, drafter.proposal.paths) for rank_MK in sequences[fold::folds]])
    if drafter.proposal.tunable:
        drafter.proposal.tune(sequences, nodes)
    return sum_C2 if folds > 1 else step_sums([arrivals(rank_MK, drafter.proposal.paths) for rank_MK in sequences])
