"""Values that are not finite, keys and fields that nobody expects in a model's JSON files, and an odd environment."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from tests.faults.attack import GENERATE, INSPECT, LATE, MEASURE, OURS, TARGET, Line, command, judged, run
from tests.faults.campaign import TryResult, failed
from tests.faults.child import Ended, forked
from tests.faults.composed import cli
from tests.faults.material import TRAINING

FIT = ("fit", *TARGET, "data.path=data.jsonl", *TRAINING, "recipe=medusa", "measure.enabled=false", "output=result")
FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
VALUES: tuple[Any, ...] = (None, True, -1, 0, 3.5, 1e400, float("nan"), "", "x", [], [None], {}, {"a": {"b": []}}, "9" * 400)
GENERATION: dict[str, tuple[Any, ...]] = {  # fields that transformers accepts, and that must not change what we measure
    "suppress_tokens": ([5, 6, 7, 8, 9],),
    "begin_suppress_tokens": (list(range(2, 200)),),
    "return_dict_in_generate": (True,),
    "output_scores": (True,),
    "num_beams": (3,),
    "do_sample": (True,),
    "temperature": (0.1, 7.0),
    "top_k": (1, 3),
    "repetition_penalty": (1.7, 0.4),
    "no_repeat_ngram_size": (2,),
    "min_new_tokens": (400,),
    "min_length": (400,),
    "max_length": (3,),
    "max_new_tokens": (1,),
    "forced_eos_token_id": (0,),
    "bad_words_ids": ([[5], [6, 7]],),
    "sequence_bias": ([[[5], 30.0]],),
    "use_cache": (False,),
    "cache_implementation": ("static", "quantized"),
    "assistant_early_exit": (2,),
    "prompt_lookup_num_tokens": (3,),
    "stop_strings": (["a"],),
    "watermarking_config": ({"bias": 9.0},),
}
LAUNCHERS: tuple[dict[str, str], ...] = (  # what launchers leave in an environment
    {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
    {"LOCAL_RANK": "1"},
    {"WORLD_SIZE": "1"},
    {"RANK": "x", "WORLD_SIZE": "y"},
    {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODELIST": "gone"},
    {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
)


def hostile_numbers(draw: random.Random, folder: Path) -> TryResult:
    """NaN, infinity, or values that overflow, in one row or entry of a target's weight; metrics stay JSON, weights finite."""
    import torch
    from safetensors.torch import load_file, save_file

    file = draw.choice(sorted((folder / "target").glob("*.safetensors")))
    tensors = load_file(file)
    name = draw.choice(sorted(tensors))
    value, row = draw.choice([float("nan"), float("inf"), -float("inf"), 1e38]), draw.randrange(len(tensors[name]))
    where = tensors[name][row]
    where.fill_(value) if draw.random() < 0.5 or not where.ndim else where[draw.randrange(len(where))].fill_(value)
    save_file(tensors, file, {"format": "pt"})
    line = draw.choice([FIT, (*FIT, "features=cached", "features.dir=features"), GENERATE, (*MEASURE, OURS, "output=result")])
    ended = run(line, folder)
    shown = f"{value} in row {row} of {name}; {' '.join(line)}"
    for path in folder.glob("result/*/*/metrics.jsonl"):
        if any(fault := [text for text in path.read_text().splitlines() if not _strict(text)]):
            return failed(f"numbers, {line[0]}", "JSON", fault[0], shown, ended)
    for path in folder.glob("result/*/*/checkpoints/*/drafter.safetensors"):
        if not all(bool(torch.isfinite(tensor).all()) for tensor in load_file(path).values()):
            return failed(f"numbers, {line[0]}", "finite weights", f"others in {path.parent.name}", shown, ended)
    return judged(f"numbers, {line[0]}", shown, ended, folder)


def _strict(text: str) -> bool:
    try:
        json.loads(text, parse_constant=lambda name: int(name))  # NaN is no number here
    except ValueError:
        return False
    return True


def hostile_keys(draw: random.Random, folder: Path) -> TryResult:
    """A key that nobody knows, or an odd value of a known one, somewhere in a JSON file of the target or of the drafter."""
    place = folder / "target" / draw.choice(FILES) if draw.random() < 0.8 else folder / OURS.partition("=")[2] / "drafter.json"
    content = json.loads(place.read_text())
    inner = [content, *(value for value in content.values() if isinstance(value, dict))]
    there = draw.choice(inner)
    key = draw.choice([*there, "", "unknown", "__class__", "a.b", "x" * 3000, "\x1b[2J", "rope_theta", "quantization_config"])
    there[key] = draw.choice(VALUES)
    place.write_text(json.dumps(content))
    line = draw.choice([command(draw), FIT])
    return judged(
        f"keys of {place.name}, {line[0]}", f"{key!r:.60}={there[key]!r:.60}; {' '.join(line)}", run(line, folder), folder
    )


def hostile_generation(draw: random.Random, folder: Path) -> TryResult:
    """Fields of generation_config.json that say how others generate: what is measured stays exact, and nothing ends early."""
    file = folder / "target" / "generation_config.json"
    chosen = draw.sample(sorted(GENERATION), draw.randint(1, 4))
    fields = {name: draw.choice(GENERATION[name]) for name in chosen}
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    line = (*MEASURE, OURS, "output=result", "measure.transformers=true")
    shown, ended = f"{fields}; {' '.join(line)}", run(line, folder)
    if "without an explanation" in ended.out + ended.err:
        return failed("generation_config.json, measure", "equal outputs", "they differ", shown, ended)
    return judged("generation_config.json, measure", shown, ended, folder)


def hostile_environment(draw: random.Random, folder: Path) -> TryResult:
    """No home, one that cannot be written, a terminal that is not UTF-8, variables of other launchers."""
    closed = folder / "closed"
    closed.mkdir(mode=0o500)
    change: dict[str, str | None] = draw.choice(
        [
            {"HOME": None, "USER": None, "LOGNAME": None},
            {"HOME": "/proc/nowhere"},
            {"HOME": str(closed), "XDG_CACHE_HOME": str(closed)},
            {"HOME": "/dev/null"},
            *LAUNCHERS,
        ]
    )
    coding = draw.choice(["ascii", "latin-1", "utf-8"])
    line = draw.choice([FIT, (*INSPECT, "data.path=data.jsonl"), GENERATE, (*MEASURE, OURS, "output=result")])
    ended = _in_environment(change, coding, line, folder)
    return judged(f"environment, {line[0]}", f"{change} {coding}; {' '.join(line)}", ended, folder)


def _in_environment(change: dict[str, str | None], coding: str, line: Line, folder: Path) -> Ended:
    work = cli(line)

    def changed() -> int:
        for name, value in change.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        sys.stdout.reconfigure(encoding=coding, errors="strict")  # type: ignore[union-attr]
        sys.stderr.reconfigure(encoding=coding)  # type: ignore[union-attr]
        return work()

    return forked(changed, folder, folder.parent / "said").wait(LATE)
