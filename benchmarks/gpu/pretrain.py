"""Collect text and pretrain a target on it, in a process of its own, so that operators are built and checked meanwhile.

Text: the Python sources of this machine, each once, with a part set apart by file. The target has bfloat16 weights with float32
masters, and learns until the time is used up.

    python -m benchmarks.gpu.pretrain REAL SECONDS [--rehearse]      REAL, SECONDS: the folder, and when pretraining is to end,
                                                                     in seconds since the epoch

Shapes: B rows, T positions, V vocabulary.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import site
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from time import perf_counter, time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.utils.logging import disable_progress_bar

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.models import random_model
from benchmarks.gpu.real import END, TEMPLATE, Folder, Part, Scale, scale_of, there
from benchmarks.gpu.results import RedError
from benchmarks.gpu.sources import ROOT

LEAST, MOST, WIDE = 400, 300_000, 120  # characters of a file, and of its mean line at most: longer ones are tables
APART = 10  # one file in this many is no pretraining text
MEASURED = 8  # one in this many of these is only for the measurement
READ, CHUNK = 1024, 2048  # files read, and texts tokenised, at once
SPACING = 2  # a prompt's length in texts of a file between two prompts

WARM, RISING = 50, 0.1  # steps, and share of the work, of a rising rate at most
ENDS = 5  # steps whose mean loss counts as the first, and the last
HELD = 32  # rows that the loss on text set apart is taken from
LEAST_STEPS = 2 * ENDS
SAVING = 2.0  # seconds between the last step and the saved target


def roots() -> list[Path]:
    """The folders of Python's own modules and of installed packages."""
    named = [sysconfig.get_path("stdlib"), *site.getsitepackages(), *sys.path]
    found = dict.fromkeys(Path(name).resolve() for name in named if name and Path(name).is_dir())
    return [path for path in found if path != ROOT]


def files() -> Iterator[Path]:
    seen: set[str] = set()
    for root in roots():
        for folder, inner, names in os.walk(root):
            inner[:] = sorted(name for name in inner if name != "__pycache__" and not name.startswith("."))
            for name in sorted(names):
                if name.endswith(".py") and (path := os.path.join(folder, name)) not in seen:
                    seen.add(path)
                    yield Path(path)


def read(path: Path) -> str | None:
    """A source's text; None for an unusual one."""
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    ordinary = LEAST <= len(text) <= MOST and len(text) <= WIDE * (1 + text.count("\n"))
    return text + "\n" if ordinary and END not in text else None


def texts(most: int) -> list[str]:
    """Every text once, up to this many characters, in an order that depends only on their contents."""
    found: dict[str, str] = {}
    held, paths = 0, files()
    with ThreadPoolExecutor() as readers:
        while held < most and (some := list(islice(paths, READ))):
            for text in filter(None, readers.map(read, some)):
                digest = hashlib.sha256(text.encode()).hexdigest()
                if digest not in found and held < most:
                    found[digest] = text
                    held += len(text)
    return [found[digest] for digest in sorted(found)]


def learnt(sample: Sequence[str], vocab: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer. Its chat template concatenates messages, so that a reply continues the prompt."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )  # fmt: skip
    tokenizer.train_from_iterator(sample, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    made.chat_template = TEMPLATE
    return made


def tokens(sources: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> NDArray[np.uint16]:
    """All texts in one row, each followed by the end token."""
    end, rows = tokenizer.eos_token_id, []
    for start in range(0, len(sources), CHUNK):
        for encoding in tokenizer.backend_tokenizer.encode_batch_fast(list(sources[start : start + CHUNK])):
            rows += [np.array(encoding.ids, np.uint16), np.array([end], np.uint16)]
    return np.concatenate(rows)


def prompts(source: str, least: int) -> list[str]:
    """Pieces of a text of at least this many characters, which begin and end with a line and are far enough apart."""
    found, piece, skipped = [], "", 0
    for line in source.splitlines(keepends=True):
        if skipped > 0:
            skipped -= len(line)
            continue
        piece += line
        if len(piece) >= least:
            found.append(piece.rstrip())
            piece, skipped = "", SPACING * least
    return found


def spread(items: list[str], count: int) -> list[str]:
    """This many of them, evenly spaced."""
    return [items[i * len(items) // count] for i in range(count)] if len(items) > count else items


def collect(part: Part, scale: Scale) -> dict[str, Any]:
    """Write tokens, tokenizer and prompts."""
    sources = texts(scale.text)
    apart, kept = sources[::APART], [text for i, text in enumerate(sources) if i % APART]
    measured, asked = apart[::MEASURED], [text for i, text in enumerate(apart) if i % MEASURED]
    few = scale.taught * len(kept) // max(1, sum(map(len, kept)))
    tokenizer = learnt(kept[: max(1, few)], scale.vocab)
    rows, held = tokens(kept, tokenizer), tokens(measured, tokenizer)
    figures: dict[str, Any] = {"files": len(sources), "characters": sum(map(len, sources)), "tokens": len(rows)}
    figures |= {"vocabulary": len(tokenizer), "apart": len(apart)}
    with part.written(figures) as folder:
        np.save(folder / "tokens.npy", rows)
        np.save(folder / "held.npy", held)
        tokenizer.save_pretrained(folder)
        questions = [piece for text in asked for piece in prompts(text, scale.prompt)][: scale.asked]
        (folder / "asked.json").write_text(json.dumps(questions), encoding="utf-8")
        pieces = spread([piece for text in measured for piece in prompts(text, scale.prompt)], scale.measured)
        lines = [json.dumps({"question_id": i, "category": "python", "turns": [piece]}) for i, piece in enumerate(pieces)]
        (folder / "measure.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        figures |= {"prompts": len(questions), "measured": len(pieces)}
    return figures


def config_of(scale: Scale, vocab: int, end: int) -> LlamaConfig:
    ids: dict[str, Any] = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": end}
    sizes: dict[str, Any] = scale.model | {"vocab_size": vocab, "tie_word_embeddings": True}
    return LlamaConfig(**sizes, **ids)


class Masters:
    """AdamW on float32 copies of a model's weights; the model has the rounded values."""

    def __init__(self, model: nn.Module, rate: float) -> None:
        self.weights: list[Tensor] = list(model.parameters())
        self.masters: list[Tensor] = [nn.Parameter(weight.detach().float()) for weight in self.weights]
        matrices, others = ([m for m in self.masters if (m.ndim > 1) is wide] for wide in (True, False))
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)

    def step(self, rate: float) -> None:
        """One step with the gradients of the model's weights, which are then freed."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        for master, weight in zip(self.masters, self.weights, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.weights, self.masters)


def batches(token_P: NDArray[np.uint16], scale: Scale, device: torch.device) -> Iterator[Tensor]:
    """[B, T + 1] rows in random order, epoch after epoch; T + 1 so that every position has its label."""
    count = (len(token_P) - 1) // scale.length
    if count < scale.rows:
        raise RedError(f"{len(token_P)} tokens of text make {count} rows of {scale.length}; a step needs {scale.rows}")
    draw = np.random.default_rng(0)
    while True:
        order = draw.permutation(count)
        for start in range(0, count - scale.rows + 1, scale.rows):
            rows = [token_P[i * scale.length : (i + 1) * scale.length + 1] for i in order[start : start + scale.rows]]
            yield torch.from_numpy(np.stack(rows).astype(np.int64)).to(device)


def loss_of(model: Any, token_BT: Tensor) -> Tensor:
    logits_BTV = model(input_ids=token_BT[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), token_BT[:, 1:].flatten())


@torch.no_grad()
def held_loss(model: Any, token_P: NDArray[np.uint16], scale: Scale, device: torch.device) -> float | None:
    """The loss on text that was set apart; None where there is too little of it."""
    count = min(HELD, (len(token_P) - 1) // scale.length)
    rows = [token_P[i * scale.length : (i + 1) * scale.length + 1] for i in range(count)]
    losses = [loss_of(model, torch.from_numpy(row.astype(np.int64))[None].to(device)) for row in rows]
    return float(torch.stack(losses).mean()) if losses else None


def train(model: Any, token_P: NDArray[np.uint16], scale: Scale, seconds: float, machine: Machine) -> dict[str, Any]:
    """The rate rises for some steps and then falls with the remaining time. Raises RedError where the model learns nothing."""
    masters = Masters(model, scale.rate)
    losses: list[Tensor] = []
    began = perf_counter()
    for step, token_BT in enumerate(batches(token_P, scale, machine.device)):
        spent = perf_counter() - began
        if spent >= seconds and step >= LEAST_STEPS:
            break
        parts = token_BT.split(scale.micro)
        total = torch.zeros((), device=machine.device)
        for part in parts:
            loss = loss_of(model, part) / len(parts)
            loss.backward()
            total += loss.detach()
        done = min(spent / seconds, (step + 1) / LEAST_STEPS)
        masters.step(scale.rate * min(1.0, max((step + 1) / WARM, done / RISING)) * max(0.02, 1.0 - done))
        losses.append(total)
        float(losses[-2:][0])  # waits for the step before: one is always under way
    machine.wait()
    taken, read = perf_counter() - began, len(losses) * scale.rows * scale.length
    first, last = (float(torch.stack(part).mean()) for part in (losses[:ENDS], losses[-ENDS:]))
    if not last < first:
        raise RedError(f"the loss went from {first:.3f} to {last:.3f} in {len(losses)} steps")
    figures: dict[str, Any] = {"steps": len(losses), "trained_tokens": read, "seconds": taken, "tokens_per_s": read / taken}
    return figures | {"first_loss": first, "last_loss": last}


def fused_norms(model: nn.Module) -> None:
    """torch's norms, one kernel each, in place of transformers' six, with the same weights."""
    for parent in list(model.modules()):
        for name, norm in parent.named_children():
            if isinstance(norm, LlamaRMSNorm):
                fused = nn.RMSNorm(norm.weight.shape[0], norm.variance_epsilon, device="meta")
                fused.weight = norm.weight
                setattr(parent, name, fused)


def pretrain(folder: Folder, scale: Scale, seconds: float, machine: Machine) -> dict[str, Any]:
    """Write the target, a transformers directory. Raises RedError."""
    tokenizer = AutoTokenizer.from_pretrained(folder.text.path)
    model = random_model(config_of(scale, len(tokenizer), tokenizer.eos_token_id), torch.float32, machine.device)
    fused_norms(model)
    model.to(torch.bfloat16).train()
    figures: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    print(f"pretraining: {figures['parameters']:,} parameters, {seconds:.0f} seconds", flush=True)
    figures |= train(model, load(folder.text.path / "tokens.npy"), scale, seconds, machine)
    figures["held_loss"] = held_loss(model.eval(), load(folder.text.path / "held.npy"), scale, machine.device)
    with folder.target.written(figures) as aside:
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
    return figures


def load(path: Path) -> NDArray[np.uint16]:
    found: NDArray[np.uint16] = np.load(path, mmap_mode="r")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("real", type=Path)
    parser.add_argument("ends", type=float)
    parser.add_argument("--rehearse", action="store_true")
    given = parser.parse_args()
    disable_progress_bar()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # all cores learn and tokenise
    machine = Machine.here(given.rehearse)
    folder, scale = Folder(given.real, machine), scale_of(machine)
    torch.zeros(1, device=machine.device)  # its context is made before the text is there
    try:
        if not there(folder.text):
            collect(folder.text, scale)
        if not there(folder.target):
            pretrain(folder, scale, max(scale.least, given.ends - SAVING - time()), machine)
    except RedError as error:
        print(f"pretraining: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
