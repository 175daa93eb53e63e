"""Reports as a measurement writes them, and runs as training leaves them, made up: what reads them needs no model."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from drafttrain.core.files import write_sealed_json
from drafttrain.train.checkpoint_manager import Progress


def prompts_of(tau: float, count: int, seed: int, plain_ms: float = 4.0, speedup: float = 1.5) -> list[dict[str, Any]]:
    """Values by prompt around a tau and a speedup; the prompts are the same for every seed."""
    random, lines = np.random.default_rng(seed), []
    for i in range(count):
        verifications = 20 + i % 7
        emitted = max(verifications, round(verifications * tau * float(random.normal(1.0, 0.08))))
        lines.append(
            {
                "question_id": str(i),
                "category": "ab"[i % 2],
                "prompt": f"{i:016x}",
                "tokens": emitted + 1,
                "baseline_tokens": emitted + 1,
                "tau": emitted / verifications,
                "emitted": emitted,
                "verifications": verifications,
                "drafted": 2 * verifications,
                "accepted": emitted - verifications,
                "exact": "same",
                "decode_ms": emitted * plain_ms / speedup * float(random.normal(1.0, 0.05)),
                "baseline_decode_ms": emitted * plain_ms,
                "loop": False,
                "baseline_loop": False,
                "stop_missed": False,
                "baseline_stop_missed": False,
            }
        )
    return lines


def report(tau: float = 2.2, speedup: float = 1.5, count: int = 24, seed: int = 0, **changes: Any) -> dict[str, Any]:
    """changes: dotted keys, `environment__threads=4` as `environment.threads`; `entry__policy` is of its one checkpoint."""
    prompts = prompts_of(tau, count, seed, speedup=speedup)
    emitted, verifications = (sum(p[key] for p in prompts) for key in ("emitted", "verifications"))
    costs = {"plain_step_ms": 4.0, "draft_ms": 0.8, "verify_ms": 6.0, "commit_ms": 0.2, "host_ms": 0.1, "verify_nodes": 3.0}
    entry: dict[str, Any] = {
        "name": "step-00400",
        "path": "checkpoints/step-00400",
        "step": 400,
        "emitted": emitted,
        "verifications": verifications,
        "tau": emitted / verifications,
        "expected_tau": tau,
        "alpha": 0.6,
        "alpha_by_position": [[0.7, 0.65, 0.75], [0.6, 0.55, 0.65]],
        "rank_by_position": [[0.6, 0.2, 0.1], [0.5, 0.2, 0.1]],
        "speedup": speedup,
        "speedup_min": speedup - 0.1,
        "speedup_max": speedup + 0.1,
        "tokens_per_s": 250 * speedup,
        "baseline_tokens_per_s": 250.0,
        "transformers_tokens_per_s": None,
        "draft_cost": 0.2,
        "verify_cost": 1.5,
        "exact_matches": count,
        "prompts": count,
        "timed_prompts": count,
        "repeats": 3,
        "parameters": 1_000_000,
        "policy": "greedy",
        "temperature": 0.0,
        "batch_size": 1,
        "training": {
            "steps": 400,
            "tokens": 50_000,
            "seconds": 60.0,
            "process_seconds": 120.0,
            "flops": None,
            "device": "cpu",
        },
        **costs,
    }
    entry |= {"slices": [{"by": "batch_size", "value": 1, **entry}], "per_prompt": prompts}
    made: dict[str, Any] = {
        "schema_version": 2,
        "target": {"name": "embedded", "path": None, "dtype": "float32", "fingerprint": "f00d", "runner": "fast"},
        "drafter": {"family": "medusa", "parameters": 1_000_000, "options": {}},
        "environment": {"torch": "2.13.0", "processor": "Example CPU", "cores": 2, "threads": 1, "device": "cpu"},
        "measure": {"prompts": "embedded", "notes": [], "decode": {"max_new_tokens": 128, "top_k": 0}},
        "checkpoints": [entry],
        "best": "step-00400",
        "training": None,
    }
    for key, value in changes.items():
        *above, last = key.split("__")
        node = made
        for part in above:
            node = entry if part == "entry" else node[part]
        node[last] = value
    return made


def version_1(made: dict[str, Any]) -> dict[str, Any]:
    """The same as versions before wrote it: no figures by prompt but tau, no record of training with a checkpoint."""
    old = copy.deepcopy(made)
    old["schema_version"] = 1
    for entry in old["checkpoints"]:
        del entry["training"], entry["rank_by_position"]
        kept = ("question_id", "category", "tokens", "tau", "exact", "loop")
        entry["per_prompt"] = [{key: p[key] for key in kept} for p in entry["per_prompt"]]
    del old["environment"]["processor"]
    return old


def write(folder: Path, made: dict[str, Any], config: str = "") -> Path:
    """A run directory with this report; config: of config.yaml."""
    folder.mkdir(parents=True)
    (folder / "report.json").write_text(json.dumps(made), encoding="utf-8")
    (folder / "run.json").write_text('{"finished": true}', encoding="utf-8")
    if config:
        (folder / "config.yaml").write_text(config, encoding="utf-8")
    return folder


def trained(folder: Path, tau: float | None, lr: float) -> None:
    """A run that was not measured and has not finished, with one checkpoint of this expected tau, if any."""
    save_run(
        folder, f"train: {{lr: {lr}, steps: 100}}\ndrafter: {{family: medusa}}\ntarget: {{path: /models/tiny, name: hf}}\n"
    )
    if tau is not None:
        progress = Progress(step=80, expected_tau=tau, expected_interval=[tau - 0.1, tau + 0.1])
        write_sealed_json(folder / "checkpoints/step-00080/trainer.json", asdict(progress))
        (folder / "checkpoints/step-00080/drafter.json").write_text("{}", encoding="utf-8")


def save_run(folder: Path, settings: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text("{}", encoding="utf-8")
    (folder / "config.yaml").write_text(settings, encoding="utf-8")
