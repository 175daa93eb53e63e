"""Two drafters follow the embedded target through GRPO: docs/online.png, and the table of docs/online.md on stdout.

    pip install "drafttrain[rl]"
    drafttrain fit recipe=medusa train.steps=600
    drafttrain fit recipe=eagle3 train.steps=600
    python scripts/online_rl.py medusa=CHECKPOINT eagle3=CHECKPOINT [--steps 40] [--out docs/online.png]

The reward is the share of capital letters in a reply: the target learns another style. Of each drafter one copy stays frozen,
the other follows by `FollowCallback`. It takes 76 seconds on two CPU cores.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

import drafttrain as dt
from drafttrain.data.files import ASSETS
from drafttrain.measure.plots import COLOURS
from drafttrain.targets.load import EMBEDDED

NAMES = {"Medusa": "medusa", "EAGLE-3": "eagle3"}
RATE = 1e-3  # of the drafters that follow
EVERY, PROMPTS, NEW_TOKENS = 8, 12, 40  # steps between measurements; what each decodes


@dataclass
class Course:
    """Figures during the training."""

    steps: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    rewarded: list[int] = field(default_factory=list)
    following: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in NAMES})
    frozen: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in NAMES})


class Measure(TrainerCallback):  # type: ignore[misc]
    """Measures both copies of each drafter on the target of the moment."""

    def __init__(self, course: Course, following: Any, frozen: Any, prompts: list[str]) -> None:
        self.course, self.following, self.frozen, self.prompts = course, following, frozen, prompts
        self.seconds = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.measure(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % EVERY == 0:
            self.measure(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "reward" in logs:
            self.course.rewarded.append(state.global_step)
            self.course.rewards.append(float(logs["reward"]))

    def measure(self, step: int) -> None:
        began = perf_counter()
        self.course.steps.append(step)
        for name in NAMES:
            for taus, drafter in ((self.course.following, self.following[name]), (self.course.frozen, self.frozen[name])):
                taus[name].append(drafter.tau(self.prompts, max_new_tokens=NEW_TOKENS, batch_size=PROMPTS))
        line = ", ".join(f"{n} {self.course.following[n][-1]:.2f} / {self.course.frozen[n][-1]:.2f}" for n in NAMES)
        print(f"step {step}: tau following / frozen: {line}", flush=True)
        self.seconds += perf_counter() - began


def capitals(completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
    """The share of capital letters in each reply."""
    replies = [messages[0]["content"] for messages in completions]
    return [sum(letter.isupper() for letter in reply) / max(16, len(reply)) for reply in replies]


def loaded(model: Any, tokenizer: Any, checkpoints: dict[str, str]) -> dict[str, dt.OnlineDrafter]:
    """A drafter of each checkpoint, by name."""
    settings = [f"train.lr={RATE}"]
    return {name: dt.OnlineDrafter(model, checkpoints[key], settings, tokenizer=tokenizer) for name, key in NAMES.items()}


def main(checkpoints: dict[str, str], steps: int, out: Path) -> None:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    began = perf_counter()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)
    with gzip.open(ASSETS / "train.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in islice(file, 320)]
    prompts = [json.loads(line)["turns"][0] for line in (ASSETS / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    following, frozen = (loaded(model, tokenizer, checkpoints) for _ in range(2))
    course = Course()
    measure = Measure(course, following, frozen, prompts[:PROMPTS])
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            folder,
            per_device_train_batch_size=16,
            num_generations=8,
            max_completion_length=NEW_TOKENS,
            max_steps=steps,
            learning_rate=5e-4,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
            seed=0,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=capitals,
            args=settings,
            train_dataset=Dataset.from_list([{"prompt": row["messages"][:1]} for row in rows]),
            processing_class=tokenizer,
            callbacks=[dt.FollowCallback(*following.values()), measure],
        )
        trainer.train()
    plot(course, out)
    table(course)
    passed, spent = perf_counter() - began, process_time()
    print(f"{passed:.0f} s, {measure.seconds:.0f} of them for measuring; {spent:.0f} s of processors' time")


def table(course: Course) -> None:
    """Print the figures as Markdown."""
    print("\n| drafter | before | frozen, at the end | following, at the end |\n|---|---|---|---|")
    for name in NAMES:
        following, frozen = course.following[name], course.frozen[name]
        print(f"| {name} | {following[0]:.2f} | {frozen[-1]:.2f} | {following[-1]:.2f} |")
    first, last = (sum(part) / len(part) for part in (course.rewards[:5], course.rewards[-5:]))
    print(f"\nreward: {first:.2f} in the first five steps, {last:.2f} in the last five\n")


def plot(course: Course, out: Path) -> None:
    """Draw tau of each drafter, and the reward."""
    figure = Figure(figsize=(10.5, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 3)
    axes[1].sharey(axes[0])
    for axis, name in zip(axes, NAMES, strict=False):
        styles = ((course.following, "following", COLOURS[0], "-", "o"), (course.frozen, "frozen", "0.4", "--", "s"))
        for taus, label, colour, line, marker in styles:
            axis.plot(course.steps, taus[name], color=colour, linestyle=line, marker=marker, markersize=4)
            text = f"{label}\n{taus[name][-1]:.2f}"
            axis.annotate(
                text, (course.steps[-1], taus[name][-1]), (7, 0), textcoords="offset points", color=colour, va="center"
            )
        axis.set_title(name, loc="left")
        axis.set_xlim(right=course.steps[-1] * 1.35)
        axis.margins(y=0.1)
    axes[0].set_ylabel("tokens per decode step (tau)")
    axes[2].plot(course.rewarded, course.rewards, color=COLOURS[1])
    axes[2].set_title("the target's reward", loc="left")
    axes[2].set_ylabel("share of capitals in a reply")
    for axis in axes:
        axis.set_xticks(range(0, course.steps[-1] + 1, 10))
        axis.set_xlabel("GRPO steps")
        axis.grid(color="0.9")
        axis.spines[["top", "right"]].set_visible(False)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs=len(NAMES), metavar="NAME=CHECKPOINT", help=", ".join(NAMES.values()))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("docs/online.png"))
    asked = parser.parse_args()
    given = dict(word.partition("=")[::2] for word in asked.checkpoints)
    if set(given) != set(NAMES.values()) or not all(Path(path).is_dir() for path in given.values()):
        parser.error(
            f"got {' '.join(asked.checkpoints)}; give a checkpoint's directory for each of {', '.join(NAMES.values())}"
        )
    main(given, asked.steps, asked.out)
