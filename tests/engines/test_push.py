"""A live engine takes the drafter of the moment, and keeps its outputs."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import drafttrain as dt
from drafttrain.engines.draft_push import PushedDrafter
from drafttrain.engines.process import ENGINES
from drafttrain.targets.load import EMBEDDED
from tests.engines.conftest import ROOT, python_for, trained

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

PROMPTS, NEW_TOKENS = 4, 48
# the engine's side of a push, in the engine's own Python, which has none of our other needs
SCRIPT = """
import json, sys
from pathlib import Path
from safetensors.torch import load_file
from drafttrain.core.errors import UserError
from drafttrain.engines import draft_push
from drafttrain.engines.scripts.vllm import ACCEPTED, DRAFTED, counters

if __name__ == "__main__":
    from vllm import LLM, SamplingParams

    job = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(
        job["target"], dtype="float32", enforce_eager=True, max_num_seqs=1, max_model_len=1024, disable_log_stats=False,
        async_scheduling=False, enable_prefix_caching=False, worker_extension_cls=draft_push.EXTENSION,
        speculative_config={"method": job["method"], "model": job["drafter"], "num_speculative_tokens": job["draft_length"]},
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=job["max_new_tokens"], detokenize=False)

    def decoded():
        before = counters(llm)
        answers = llm.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], sampling, use_tqdm=False)
        after = counters(llm)
        found = {name: after[key] - before[key] for name, key in (("accepted", ACCEPTED), ("drafted", DRAFTED))}
        return found | {"outputs": [list(answer.outputs[0].token_ids) for answer in answers]}

    first = decoded()
    refused = None
    try:
        draft_push.receiver_of(llm).receive(draft_push.Draft(1, lambda: iter(load_file(job["weights"]).items()), None))
    except UserError as error:
        refused = str(error)
    Path(sys.argv[2]).write_text(json.dumps([first, decoded(), refused]))
"""


class Kept:
    """Keeps the weights of a push for the engine's process."""

    stack = "vllm"

    def __init__(self, file: Path) -> None:
        self.file = file

    def receive(self, draft: PushedDrafter) -> None:
        save_file({name: tensor.contiguous().clone() for name, tensor in draft.weights()}, self.file)


def pushed(drafter: dt.OnlineDrafter, first: Path, weights: Path, method: str, folder: Path) -> list[Any]:
    """Counts and outputs of a live engine before and after a push, and why it was refused.

    first: the draft that the engine starts with. weights: those that are pushed.
    """
    tokenizer = drafter.target.tokenizer
    lines = (ROOT / "drafttrain" / "assets" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    chats = [[{"role": "user", "content": json.loads(line)["turns"][0]}] for line in lines[:PROMPTS]]
    asked = {"add_generation_prompt": True, "return_dict": False}
    job: dict[str, Any] = {"target": str(EMBEDDED), "drafter": str(first), "method": method, "weights": str(weights)}
    job |= {"prompts": [list(tokenizer.apply_chat_template(chat, **asked)) for chat in chats], "max_new_tokens": NEW_TOKENS}
    job |= {"draft_length": min(3, drafter.module.draft_length)}
    files = [folder / file for file in ("push.py", "job.json", "result.json")]
    files[0].write_text(SCRIPT, encoding="utf-8")
    files[1].write_text(json.dumps(job), encoding="utf-8")
    environment = os.environ | ENGINES["vllm"].environment | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([python_for("vllm"), *map(str, files)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[Any] = json.loads(files[2].read_text(encoding="utf-8"))
    return found


def follower(start: str | Path) -> dt.OnlineDrafter:
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)
    return dt.OnlineDrafter(model, start, tokenizer=AutoTokenizer.from_pretrained(EMBEDDED))


@pytest.mark.parametrize(("name", "method"), [("medusa", "medusa"), ("eagle3.1", "eagle3")])
def test_vllm_draft_pushed_between_requests_raises_acceptance(name: str, method: str, tmp_path: Path) -> None:
    """From a drafter that has learnt nothing to a trained one: more is accepted, and the outputs stay."""
    python_for("vllm")
    drafter, first, weights = follower(trained(name)), list[Path](), tmp_path / "weights.safetensors"
    drafter.push(Kept(weights))
    with torch.no_grad():
        for parameter in drafter.module.parameters():
            parameter.normal_(std=0.02)
    drafter.push(dt.ReloadedDirectory(tmp_path / "drafts", first.append))
    before, after, refused = pushed(drafter, first[0], weights, method, tmp_path)
    assert refused is None and before["outputs"] == after["outputs"]
    assert after["accepted"] / after["drafted"] > 0.15 + before["accepted"] / before["drafted"]
    print(f"{name}: accepted {before['accepted']} of {before['drafted']}, then {after['accepted']} of {after['drafted']}")


def test_vllm_draft_push_with_shared_head_is_refused_and_keeps_outputs(tmp_path: Path) -> None:
    """vLLM gives a draft whose head equals the target's the target's own module."""
    python_for("vllm")
    drafter, first, weights = follower("eagle3"), list[Path](), tmp_path / "weights.safetensors"
    drafter.push(dt.ReloadedDirectory(tmp_path / "drafts", first.append))
    with torch.no_grad():
        for parameter in drafter.module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    drafter.push(Kept(weights))
    before, after, refused = pushed(drafter, first[0], weights, "eagle3", tmp_path)
    assert "the target's own lm_head.weight" in str(refused) and before["outputs"] == after["outputs"]
