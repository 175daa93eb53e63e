"""The loop: batch, frozen target, drafter, one optimiser step; then checkpoints that a killed run goes on from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from drafttrain.adapted import AdaptedObjective, rate_scale
from drafttrain.atomic import atomic_directory, atomic_write_json
from drafttrain.batch import TrainBatch
from drafttrain.checkpoint import (
    ADAPTER,
    CheckpointMeta,
    TargetRecord,
    adapter_state,
    checkpoint_name,
    list_checkpoints,
    newest_valid,
    prune,
    read_weights,
    save_drafter,
)
from drafttrain.data.dataset import Dataset, check_supervised, collate, shard, token_counts
from drafttrain.drafter import Drafter
from drafttrain.features.online import Online
from drafttrain.losses import LossOptions, Objective, StepCounts, teacher_forced
from drafttrain.targets.adapt import Adapter
from drafttrain.targets.load import LoadedTarget
from drafttrain.train import DeepSpeedOptions, TrainOptions
from drafttrain.train.engine import Engine, World
from drafttrain.train.logger import Logger
from drafttrain.train.onpolicy import OnPolicy
from drafttrain.train.progress import Console
from drafttrain.train.schedule import learning_rate
from drafttrain.tree import expected_nodes
from drafttrain.treesize import best_nodes


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained on what. options: the family's own, for the checkpoint. nodes: a tree's budget; None: as many as pay.
    adapter: of a target that is trained too. start: weights to begin with instead of the family's own.
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


@dataclass
class Progress:
    """What a checkpoint must remember beside tensors. seconds: of training, all sessions of the run together."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss: float | None = None
    expected_tau: float | None = None


OUT_OF_REACH = 2**31


class Trainer:
    """Trains `job` in `run_dir`; the checkpoints lie in its `checkpoints` folder."""

    def __init__(self, job: Job, world: World, run_dir: Path) -> None:
        self.job, self.world, self.folder = job, world, run_dir / "checkpoints"
        self.device = job.loaded.target.device
        job.drafter.to(self.device)
        job.drafter.prepare(lambda: token_counts(job.data.train, job.loaded.target.shape.vocab_size))
        if job.start is not None:  # after the family has prepared itself from the data: the start has what it needs
            job.drafter.load_state_dict(job.start)
        self.online = Online(job.adapter.target if job.adapter else job.loaded.target, job.drafter.taps)
        self.engine = Engine(objective_of(job), job.train, job.deepspeed, world, job.adapter)
        self.on_policy = OnPolicy(job.drafter, job.loaded.target.stop_ids, job.train, world)
        self.progress = Progress()
        self._resume()

    def train(self, logger: Logger | None, console: Console) -> Progress:
        """All steps that are left. logger: on rank 0 alone."""
        options = self.job.train
        if self.job.drafter.starts_usable and self.progress.step == 0 and not (self.folder / checkpoint_name(0)).exists():
            self._checkpoint()  # what distillation is to be compared with
        with console.bar(options.steps, self.progress.step) as bar:
            for step in range(self.progress.step, options.steps):
                began = perf_counter()
                values, tokens = self._step(step)
                self.progress.step, self.progress.loss = step + 1, values["loss"]
                self.progress.tokens += tokens
                self.progress.seconds += perf_counter() - began
                values["tokens_per_s"] = tokens / (perf_counter() - began)
                if logger is not None:
                    logger.step(step + 1, values)
                bar.step(step + 1, tokens, values, line=(step + 1) % options.log_every == 0)
                if (step + 1) % options.checkpoint_every == 0 or step + 1 == options.steps:
                    self._checkpoint()
        return self.progress

    def _step(self, step: int) -> tuple[dict[str, Any], int]:
        """One optimiser step; its figures over all processes, and the number of tokens it read."""
        options, progress = self.job.train, (step + 1) / self.job.train.steps
        rows = self.on_policy.rows(self.job.data.global_batch(step, options.global_batch), step)
        micro = [self._batch(part) for part in shard(rows, self.world.rank, self.world.size, options.micro_batch)]
        own = torch.tensor([sum(b.supervised() for b in micro)], device=self.device)
        supervised = int(self.world.sum(own))
        check_supervised(supervised, step + 1)
        total, counted = torch.zeros(1, dtype=torch.float64, device=self.device), None
        for i, batch in enumerate(micro):
            filled = batch if self.job.adapter else self.online.fill(batch)  # an adapted target's states need gradients
            loss, counts = self.engine.forward(filled, progress)
            self.engine.backward(loss, supervised)
            total += loss.detach().double()
            counted = counts.packed() if counted is None else counted + counts.packed()
            if i + 1 < len(micro):
                self.engine.micro_done()
        rate = learning_rate(options, step)
        adapter = self.job.adapter
        norm = self.engine.step(rate, rate_scale(adapter.spec, progress, options.warmup) if adapter else 1.0)
        assert counted is not None
        values = {"loss": float(self.world.sum(total)) / supervised} | figures(StepCounts.unpacked(self.world.sum(counted)))
        values |= {"lr": rate, "grad_norm": norm, "supervised_tokens": supervised}
        return values, sum(len(row.token_ids) for row in rows)

    def _batch(self, rows: Any) -> TrainBatch:
        pad = self.job.loaded.tokenizer.pad_token_id
        return collate(rows, 0 if pad is None else pad).to(self.device)

    def held_out(self) -> Iterator[TrainBatch]:
        """The conversations set apart, with the target's states."""
        for start in range(0, len(self.job.data.held_out), self.job.train.micro_batch):
            yield self.online.fill(self._batch(self.job.data.held_out[start : start + self.job.train.micro_batch]))

    def _tune(self) -> None:
        """Fit the proposal's shape to held-out ranks; note the expected tau (greedy) it gives."""
        drafter, target = self.job.drafter, self.job.loaded.target
        drafter.eval()
        hits = [teacher_forced(drafter, target, batch) for batch in self.held_out()]
        drafter.train()
        texts = [text for h in hits for text in h.rank_MK.split(h.length_D)]
        if not target.trees:  # a rank that no path reaches: what is left to choose from is the chain
            texts = [torch.where(text == 0, 0, OUT_OF_REACH) for text in texts]
        if texts:
            if drafter.tunable:
                drafter.tune(texts, self.job.nodes or self._best_nodes(texts))
            self.progress.expected_tau = 1.0 + expected_nodes(texts, drafter.paths())

    def _best_nodes(self, texts: list[Tensor]) -> int:
        """As many as pay on the first process's device; its weights are whole, or `fit` has refused."""
        drafter = self.job.drafter
        drafter.eval()
        found = best_nodes(self.job.loaded.target, drafter, texts) if self.world.first else 0
        drafter.train()
        return int(self.world.share(found))

    def _checkpoint(self) -> None:
        """A whole directory or none: weights and settings, every process's optimiser share, and where training stands."""
        self._tune()
        final = self.folder / checkpoint_name(self.progress.step)
        with ExitStack() as stack:
            aside = stack.enter_context(atomic_directory(final)) if self.world.first else None
            aside = self.world.share(aside)
            self.engine.save_state(aside)
            with self.engine.whole():
                if self.world.first:
                    state = self.job.drafter.state_dict() | adapter_state(self.job.adapter)
                    save_drafter(aside, state, meta_of(self.job, self.progress.step))
                    atomic_write_json(aside / "trainer.json", asdict(self.progress))
            self.world.wait()
        if self.world.first:
            prune(self.folder, self.job.train.keep_last, keep={best_checkpoint(self.folder).name, checkpoint_name(0)})
        self.world.wait()

    def _resume(self) -> None:
        newest = self.world.share(newest_valid(self.folder) if self.world.first else None)
        if newest is None:
            return
        self.progress = Progress(**json.loads((newest / "trainer.json").read_text(encoding="utf-8")))
        prefix = (ADAPTER,) if self.job.adapter else ()
        saved = read_weights(newest)
        weights = {name if name.startswith(prefix) else f"drafter.{name}": tensor for name, tensor in saved.items()}
        self.engine.load_state(newest, weights)


def objective_of(job: Job) -> Objective:
    if job.adapter is not None:
        return AdaptedObjective(job.drafter, job.loaded.target, job.loss, job.adapter)
    return Objective(job.drafter, job.loaded.target, job.loss)


def without_training(job: Job, world: World, run_dir: Path) -> Progress:
    """The one checkpoint, of step 0, of a drafter that learns nothing: its settings. No engine is started."""
    progress = Progress()
    if world.first:
        with atomic_directory(run_dir / "checkpoints" / checkpoint_name(progress.step)) as aside:
            save_drafter(aside, job.drafter.state_dict(), meta_of(job, progress.step))
            atomic_write_json(aside / "trainer.json", asdict(progress))
    world.wait()
    return progress


def meta_of(job: Job, step: int) -> CheckpointMeta:
    shape, about = job.loaded.target.shape, job.loaded.description
    target = TargetRecord(
        name=about["name"],
        path=about["path"],
        revision=about["revision"],
        dtype=about["dtype"],
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        blocks=shape.blocks,
        fingerprint=job.loaded.target.fingerprint,
    )
    adapter = None if job.adapter is None else asdict(job.adapter.spec)
    return CheckpointMeta(job.family, job.options, job.drafter.decode_settings(), target, step, adapter)


def best_checkpoint(folder: Path) -> Path:
    """The checkpoint of the highest expected tau on held-out text; without any, the newest."""

    def merit(path: Path) -> tuple[float, int]:
        progress = Progress(**json.loads((path / "trainer.json").read_text(encoding="utf-8")))
        return (progress.expected_tau or 0.0, progress.step)

    return max(list_checkpoints(folder), key=merit)


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
