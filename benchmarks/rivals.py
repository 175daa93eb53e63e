"""Our recipes compared with speculators' own training: tau after equal steps on the same batches.

    python -m benchmarks.rivals --recipes eagle3 dflash --steps 600 [--rates 5e-3 1e-2] [--prompts 40]
                                [--target DIR --data DIR --template FILE --prompts-file FILE] [--out DIR] [--table]

Each recipe is trained unchanged. The rival's module of the same kind is trained on the same batches with the states of the
same frozen target: with its own initialisation, loss, optimizer, schedule and other defaults, once at its own rate and once at
each of --rates. Settings that decide a step's cost are the recipe's: layers, draft length, block size, anchors. The rival's
drafter is saved, and imported like a published one (`make test-engines` compares the library's models with what is imported).
Our decoder measures both: greedy, as a chain and as a tree of 18 nodes, and by expected tau on the held-out conversations.
Rows are kept and not run again; --table prints them.

The rival is installed in addition to the project's packages, without its own requirements:

    pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0 loguru openai python-dotenv pydantic-settings
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from time import process_time
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.common import DiffersError
from benchmarks.rival_modules import dense_mask
from drafttrain.cli import main as cli
from drafttrain.cli.config import compose_run
from drafttrain.commands import fit
from drafttrain.core.errors import UserError
from drafttrain.core.intervals import accepted_length
from drafttrain.core.sampling import Sampling
from drafttrain.data import DataOptions
from drafttrain.data.chat import Encoded
from drafttrain.data.dataset import Dataset, collate, load_dataset
from drafttrain.data.prompts import load_prompts
from drafttrain.decoding.scheduler import Decoder
from drafttrain.drafters import families
from drafttrain.drafters.checkpoint import read_meta, read_weights
from drafttrain.export.convert import converted
from drafttrain.export.external import ExternalCheckpoint
from drafttrain.features.online import Online
from drafttrain.measure import cells
from drafttrain.measure.acceptance import pooled
from drafttrain.measure.cases import encode_cases
from drafttrain.model.batch import TrainBatch
from drafttrain.model.drafter import Drafter
from drafttrain.model.target import Taps
from drafttrain.objective.losses import teacher_forced
from drafttrain.targets import TargetOptions
from drafttrain.targets.load import LoadedTarget, load_target
from drafttrain.train.trainer import Trainer, tuned_sums

INSTALL = "pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0 loguru openai python-dotenv pydantic-settings"
RIVAL, OURS = "speculators", "ours"
RECIPES = ("eagle3", "peagle", "dflash", "dspark", "dflash2")
SHIFTED = ("eagle3", "peagle")  # rivals that read a token together with the state before it
BATCH, NODES, LENGTH = 4, 18, 128  # conversations of a step, nodes of a tree, new tokens of an answer


@dataclass(frozen=True)
class Setting:
    """One training run."""

    target: str
    recipe: str
    steps: int
    who: str  # ours, the rival, or the rival at another rate than its own
    seed: int

    @property
    def rate(self) -> float | None:
        words = self.who.split()
        return float(words[-1]) if len(words) > 1 else None


def settings(given: Namespace) -> Iterator[Setting]:
    """The requested settings, ours before its rivals."""
    name = Path(given.target).name if given.target else "embedded"
    for recipe in given.recipes:
        for who in (OURS, RIVAL, *(f"{RIVAL} lr {rate:g}" for rate in given.rates)):
            yield Setting(name, recipe, given.steps, who, given.seed)


class Ground:
    """The material for training and measuring both. Conversations, their order and the held-out part are `drafttrain fit`'s."""

    def __init__(self, given: Namespace) -> None:
        asked = TargetOptions(name="hf", path=given.target) if given.target else TargetOptions()
        self.loaded: LoadedTarget = load_target(asked)
        self.given, self.target = given, self.loaded.target

    @cached_property
    def data(self) -> Dataset:
        length = min(DataOptions.max_length, self.target.shape.max_positions)
        path = self.given.data or DataOptions.path
        options = DataOptions(path=path, template=self.given.template, max_length=length)
        return load_dataset(options, self.loaded.tokenizer, progress=False)

    @cached_property
    def prompts(self) -> list[list[int]]:
        asked = load_prompts(self.given.prompts_file or "embedded", None)
        cases, _ = encode_cases(asked, self.loaded.tokenizer, self.target.shape.max_positions - LENGTH)
        return [case.tokens for case in cases[: self.given.prompts]]

    def batch(self, rows: Sequence[Encoded], taps: Taps) -> TrainBatch:
        """A batch in the form of the rival's loader: all texts of a step one after the other, without padding."""
        return Online(self.target, taps).fill(collate(rows, 0))

    def expected_tau(self, drafter: Drafter) -> float:
        """Expected tau, as a training run reports it at its end, with the recipe's own chain or tree."""
        rows, texts = self.data.held_out, list[Tensor]()
        for start in range(0, len(rows), BATCH):
            hits = teacher_forced(drafter, self.target, self.batch(rows[start : start + BATCH], drafter.taps))
            texts += hits.rank_MK.split(hits.length_D)
        return float(accepted_length(tuned_sums(drafter, texts, NODES if drafter.proposal.tunable else 0).sum(0)))

    def tau(self, drafter: Drafter) -> float:
        decoder = Decoder(self.target, drafter, "greedy", Sampling(), self.target.stop_ids, LENGTH)
        found = pooled(decoder.run(self.prompts).results).tau
        assert found is not None
        return found


def recipe_options(recipe: str) -> Any:
    """The drafter's options in the recipe, for a small target."""
    return compose_run(recipe, []).options.drafter


@torch.no_grad()
def measured(ground: Ground, checkpoint: Path, options: Any) -> dict[str, Any]:
    """The figures of a checkpoint's drafter: as a chain, as a tree, and with the proposal of these options."""
    family, weights = families()[read_meta(checkpoint).family], read_weights(checkpoint)

    def drafter(**changed: Any) -> Drafter:
        made = family.build(replace(options, **changed), ground.target)
        made.load_state_dict(weights)
        return made.to(ground.target.device).eval()

    return {
        "tau_chain": ground.tau(drafter(tree="chain", nodes=None)),
        "tau_tree": ground.tau(drafter(tree="dynamic", nodes=NODES)),
        "expected_tau": ground.expected_tau(drafter()),
        "checkpoint": str(checkpoint),
    }


# ours


class Clocked(Trainer):
    """Adds up the processor time of its steps, the target's part included."""

    spent = 0.0

    def _step(self, *given: Any) -> Any:
        began = process_time()
        found = super()._step(*given)
        Clocked.spent += process_time() - began
        return found


def ours(setting: Setting, ground: Ground) -> dict[str, Any]:
    given = ground.given
    folder, log = given.out / "run", given.out / "run.log"
    command = ["fit", f"recipe={setting.recipe}", f"output={folder}", "measure=off", "logger=none", "train.keep_last=1"]
    command += [f"train.steps={setting.steps}", f"train.checkpoint_every={setting.steps}", f"train.seed={setting.seed}"]
    if given.target:
        command += ["target=hf", f"target.path={given.target}", f"data.path={given.data}"]
        command += [f"on_target=embedded_{setting.recipe}"]  # a small target, too
        command += [f"data.template={given.template}"] if given.template else []
    process = multiprocessing.get_context("spawn").Process(target=_fit, args=(command, log))
    process.start()
    process.join()
    if process.exitcode:
        raise UserError(f"{setting.recipe}: {log.read_text(encoding='utf-8').strip()[-300:]}")
    run = max((folder / setting.recipe).iterdir(), key=lambda path: path.name)
    checkpoint = next(path for path in run.glob("checkpoints/step-*") if int(path.name.split("-")[1]) == setting.steps)
    progress = json.loads((checkpoint / "trainer.json").read_text(encoding="utf-8"))
    seconds = float(log.read_text(encoding="utf-8").split()[-1])
    options = families()[setting.recipe].options(**read_meta(checkpoint).options)
    figures = {"tokens": progress["tokens"], "tokens_per_s": progress["tokens"] / seconds}
    return measured(ground, checkpoint, options) | figures


def _fit(command: list[str], log: Path) -> None:
    """Train in a separate process, whose output goes to this file, the seconds of its steps last."""
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    with patch.object(fit, "Trainer", Clocked):
        code = cli.run(command)
    print(f"\n{Clocked.spent}", flush=True)
    sys.exit(code)


# the rival's


def flags(recipe: str, options: Any, ground: Ground, steps: int, rate: float | None) -> dict[str, Any]:
    """The options that the rival's command line would get; the others keep its defaults.

    Attention and losses have a compiled and a plain form in the rival, with the same mathematics; a CPU uses the plain ones.
    It would compute in bfloat16, but here in float32, which rounds less. Slots of its block drafters see no later slot of
    their block unless layers are set to full attention, as DFlash was published. Its window of 2,048 is longer than any text
    here. Its MTP needs a target with its own module, and is left out.
    """
    layers = getattr(options, "layers", 1)
    asked = {"speculator_type": recipe, "verifier_name_or_path": ground.loaded.path, "data_path": "-", "num_layers": layers}
    asked |= {"draft_attn_impl": "sdpa", "loss_implementation": "eager", "hidden_states_dtype": "float32", "max_steps": steps}
    asked |= {"lr": rate} if rate is not None else {}
    if recipe == "peagle":
        asked |= {"num_depths": options.draft_length}
    if hasattr(options, "block_size"):
        asked |= {"block_size": options.block_size, "max_anchors": options.anchors * BATCH}
        asked |= {"full_attention_indices": list(range(layers))}
    blocks = ground.target.shape.blocks
    if len({2, blocks // 2, blocks - 3}) < 3:  # its default needs a deeper target: it reads what the recipe's drafter reads
        asked |= {"target_layer_ids": [b + 1 for b in families()[recipe].build(options, ground.target).taps.blocks]}
    return asked


class Rival:
    """The rival's module with its own loss, optimizers and schedule."""

    def __init__(self, recipe: str, options: Any, ground: Ground, steps: int, rate: float | None, seed: int) -> None:
        from loguru import logger
        from speculators import SpeculatorModel
        from speculators.train.cli import build_draft_model
        from speculators.train.config.schema import TrainConfig
        from speculators.train.optimizers import build_optimizers
        from speculators.train.trainer import TrainerConfig, _resolve_scheduler_steps
        from transformers import get_linear_schedule_with_warmup

        logger.disable("speculators")
        asked = flags(recipe, options, ground, steps, rate)
        args = Namespace(**TrainConfig.from_sources(cli=asked, argv=[]).flatten())
        torch.manual_seed(seed)
        self.recipe, self.ground = recipe, ground
        kind = SpeculatorModel.registry[recipe]
        self.model: Any = build_draft_model(args, kind, None, None, ground.target.shape.vocab_size).float()
        self.model._create_mask_fn = dense_mask
        self.loss_arguments, _ = kind.get_trainer_kwargs(**vars(args))
        known = TrainerConfig._fields
        config = TrainerConfig(num_epochs=1, **{k: v for k, v in vars(args).items() if k in known})
        self.optimizers = build_optimizers(self.model, config)
        assert args.scheduler_type == "linear"
        warmup, total = _resolve_scheduler_steps(config, steps)
        self.schedulers = [get_linear_schedule_with_warmup(o, warmup, total) for o in self.optimizers]

    @property
    def blocks(self) -> list[int]:
        """The target's blocks whose outputs the rival reads."""
        return [k - 1 for k in self.model.target_layer_ids]

    def batch(self, rows: Sequence[Encoded]) -> dict[str, Any]:
        """A batch in the form of the rival's loader: all texts of a step one after the other, without padding."""
        from speculators.models.eagle3.data import shift_batch
        from speculators.train.data import CollateFn

        last = self.ground.target.shape.blocks - 1
        texts, filled = list[dict[str, Tensor]](), self.ground.batch(rows, Taps((*self.blocks, last)))
        for row, (tokens, mask) in enumerate(zip(filled.token_BT, filled.mask_BT, strict=True)):
            for document in range(int(filled.document_BT[row].max()) + 1):
                own = filled.document_BT[row] == document
                texts.append(
                    {
                        "hidden_states": torch.cat([filled.hidden[b][row][own] for b in self.blocks], -1),
                        "input_ids": tokens[own],
                        "verifier_last_hidden_states": filled.hidden[last][row][own],
                        "loss_mask": mask[own].long(),
                        "lengths": own.sum()[None],
                        "position_ids": torch.arange(int(own.sum())),
                    }
                )
        shift = shift_batch if self.recipe in SHIFTED else None
        room = sum(len(text["input_ids"]) - (shift is not None) for text in texts)
        made = CollateFn(room, self.ground.target.shape.hidden_size, len(self.blocks), torch.float32, shift)(texts)
        del made["error_records"]
        return dict(made)

    def step(self, rows: Sequence[Encoded]) -> float:
        _, loss, _ = self.model(**self.batch(rows), **self.loss_arguments)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for part in (*self.optimizers, *self.schedulers):
            part.step()
        return float(loss.detach())

    def checkpoint(self, folder: Path) -> Path:
        """A checkpoint of ours with the rival's drafter, which is saved and then imported like a published one."""
        self.model.save_pretrained(folder)
        return converted(ExternalCheckpoint(folder), self.ground.loaded, print)


def rivals(setting: Setting, ground: Ground) -> dict[str, Any]:
    options = recipe_options(setting.recipe)
    rival = Rival(setting.recipe, options, ground, setting.steps, setting.rate, setting.seed)
    tokens, loss, began = 0, 0.0, process_time()
    rival.model.train()
    for step in range(setting.steps):
        rows = ground.data.global_batch(step, BATCH)
        tokens += sum(len(row.token_ids) for row in rows)
        loss = rival.step(rows)
    seconds = process_time() - began
    checkpoint = rival.checkpoint(ground.given.out / RIVAL)
    meta = read_meta(checkpoint)
    assert meta.imported is not None
    own = replace(options, **{name: meta.options[name] for name in meta.imported["determined"]})
    return measured(ground, checkpoint, own) | {"tokens": tokens, "tokens_per_s": tokens / seconds, "loss": loss}


# rows


def rows_of(file: Path) -> list[dict[str, Any]]:
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [json.loads(line) for line in lines]


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("target", "recipe", "steps", "who", "seed"))


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each row, ours before the rivals of each target and recipe."""
    header = ("target", "recipe", "who", "steps", "tau chain", "tau tree", "expected tau", "tokens / CPU second")
    lines = []
    for row in sorted(rows, key=lambda row: (row["target"], row["recipe"], row["steps"], row["who"] != OURS)):
        taus = [f"{row[name]:.2f}" for name in ("tau_chain", "tau_tree", "expected_tau")]
        what = (row["target"], f"`{row['recipe']}`", row["who"], str(row["steps"]))
        lines.append((*what, *taus, f"{row['tokens_per_s']:,.0f}"))
    return cells.rows(header, lines)


def run(setting: Setting, ground: Ground, known: list[dict[str, Any]]) -> dict[str, Any]:
    """Train and measure all settings. Raises DiffersError where ours did not train on the same tokens."""
    row = asdict(setting) | (ours if setting.who == OURS else rivals)(setting, ground)
    for other in known:
        if key(other)[:3] == key(row)[:3] and other["seed"] == row["seed"] and other["tokens"] != row["tokens"]:
            raise DiffersError(f"{setting.who} read {row['tokens']:,} tokens, {other['who']} {other['tokens']:,}")
    return row


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=["eagle3"], choices=RECIPES)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rates", type=float, nargs="*", default=[5e-3, 1e-2], help="in addition to the rival's own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--prompts-file")
    parser.add_argument("--target")
    parser.add_argument("--data")
    parser.add_argument("--template")
    parser.add_argument("--out", type=Path, default=Path("outputs/rivals"))
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / "rows.jsonl"
    if not given.table:
        if find_spec("speculators") is None:
            print(f"speculators is not installed; {INSTALL}", file=sys.stderr)
            return 2
        ground = Ground(given)
        for setting in settings(given):
            known = rows_of(file)
            if key(asdict(setting)) in {key(row) for row in known}:
                continue
            row = run(setting, ground, known)
            with file.open("a", encoding="utf-8") as opened:
                opened.write(json.dumps(row) + "\n")
            figures = " ".join(f"{row[name]:.3f}" for name in ("tau_chain", "tau_tree", "expected_tau"))
            print(f"{setting.target} {setting.recipe} {setting.steps} {setting.who}: {figures}", flush=True)
    print(table(rows_of(file)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
