"""A drafter follows the embedded target in the pauses of a loop, and through the loop's own checkpoints (docs/online.md).

    drafttrain fit recipe=medusa train.steps=600
    python scripts/online_pauses.py CHECKPOINT [MILLISECONDS]

The loop decodes replies, feeds them, pauses, and fine-tunes the target on replies in capital letters. Every eighth step it
saves both models by torch.save, and goes on with a drafter that is made anew and loaded. A copy of the drafter stays frozen.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import drafttrain as dt
from drafttrain.data.files import ASSETS
from drafttrain.targets.load import EMBEDDED

STEPS, ROWS, EVERY, PROMPTS = 32, 16, 8, 12


def main(checkpoint: str, milliseconds: float, saved: Path) -> None:
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    drafter, frozen = (dt.OnlineDrafter(model, checkpoint, ["train.lr=2e-3"], tokenizer=tokenizer) for _ in range(2))
    with gzip.open(ASSETS / "train.jsonl.gz", "rt", encoding="utf-8") as file:
        conversations = [json.loads(line)["messages"] for line in file]
    lines = (ASSETS / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["turns"][0] for line in lines[:PROMPTS]]
    print(f"step 0: tau {drafter.tau(prompts):.2f}", flush=True)

    def encoded(rows: list[Any], **template: Any) -> Any:
        texts = [tokenizer.apply_chat_template(messages, tokenize=False, **template) for messages in rows]
        return tokenizer(texts, return_tensors="pt", padding=True, truncation=True, max_length=128)

    taken = 0
    for step in range(STEPS):
        rows = conversations[ROWS * step : ROWS * (step + 1)]
        asked = encoded([messages[:1] for messages in rows], add_generation_prompt=True)
        rollouts = model.generate(**asked, max_new_tokens=48, do_sample=True)
        replies = torch.arange(rollouts.shape[1]) >= asked["input_ids"].shape[1]
        real = torch.nn.functional.pad(asked["attention_mask"], (0, int(replies.sum())), value=1)
        drafter.feed(rollouts, mask=replies.expand_as(rollouts), attention=real, version=step)
        taken += len(drafter.replay(milliseconds=milliseconds))  # another loop waits here, for rewards
        batch = encoded([[first, {**second, "content": second["content"].upper()}] for first, second, *_ in rows])
        model(**batch, labels=batch["input_ids"].where(batch["attention_mask"] == 1, -100)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % EVERY == 0:
            torch.save({"policy": model.state_dict(), "drafter": drafter.state_dict()}, saved)
            drafter = dt.OnlineDrafter(model, checkpoint, ["train.lr=2e-3"], tokenizer=tokenizer)
            drafter.load_state_dict(torch.load(saved, weights_only=True)["drafter"])
            taus = f"tau {drafter.tau(prompts):.2f}, frozen {frozen.tau(prompts):.2f}"
            print(f"step {step + 1}: {taken} steps in pauses, {taus}", flush=True)


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 3 or not Path(sys.argv[1]).is_dir():
        sys.exit("give the directory of a checkpoint, and the length of a pause in milliseconds (4000)")
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1], float((sys.argv[2:] or [4000])[0]), Path(folder) / "checkpoint.pt")
