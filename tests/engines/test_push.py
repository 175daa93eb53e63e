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
from drafttrain.engines.draft_push import Draft
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
    draft_push.receiver_of(llm).receive(draft_push.Draft(1, lambda: iter(load_file(job["weights"]).items()), None))
    Path(sys.argv[2]).write_text(json.dumps([first, decoded()]))
"""


class Kept:
    """Keeps the weights of a push for the engine's process."""

    stack = "vllm"

    def __init__(self, file: Path) -> None:
        self.file = file

    def receive(self, draft: Draft) -> None:
        save_file({name: tensor.contiguous().clone() for name, tensor in draft.weights()}, self.file)


@pytest.mark.parametrize(("name", "method"), [("medusa", "medusa"), ("eagle3.1", "eagle3")])
def test_vllm_takes_a_draft_between_requests(name: str, method: str, tmp_path: Path) -> None:
    """From a drafter that has learnt nothing to a trained one: more is accepted, and the outputs stay."""
    python = python_for("vllm")
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    drafter, fresh = dt.OnlineDrafter(model, trained(name), tokenizer=tokenizer), list[Path]()
    drafter.push(Kept(tmp_path / "weights.safetensors"))
    with torch.no_grad():
        for parameter in drafter.module.parameters():
            parameter.normal_(std=0.02)
    drafter.push(dt.ReloadedDirectory(tmp_path / "drafts", fresh.append))
    lines = (ROOT / "drafttrain" / "assets" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    chats = [[{"role": "user", "content": json.loads(line)["turns"][0]}] for line in lines[:PROMPTS]]
    asked = {"add_generation_prompt": True, "return_dict": False}
    job: dict[str, Any] = {"target": str(EMBEDDED), "drafter": str(fresh[0]), "method": method}
    job |= {"prompts": [list(tokenizer.apply_chat_template(chat, **asked)) for chat in chats], "max_new_tokens": NEW_TOKENS}
    job |= {"draft_length": min(3, drafter.module.draft_length), "weights": str(tmp_path / "weights.safetensors")}
    files = [tmp_path / file for file in ("push.py", "job.json", "result.json")]
    files[0].write_text(SCRIPT, encoding="utf-8")
    files[1].write_text(json.dumps(job), encoding="utf-8")
    environment = os.environ | ENGINES["vllm"].environment | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([python, *map(str, files)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    before, after = json.loads(files[2].read_text(encoding="utf-8"))
    assert before["outputs"] == after["outputs"]
    assert after["accepted"] / after["drafted"] > 0.15 + before["accepted"] / before["drafted"]
    print(f"{name}: accepted {before['accepted']} of {before['drafted']}, then {after['accepted']} of {after['drafted']}")
