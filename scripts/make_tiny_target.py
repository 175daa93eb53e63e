"""Make the embedded target: tokenizer, model, training conversations and evaluation prompts.

    python scripts/make_tiny_target.py corpus   --work build/tiny   # sources -> split, tokenizer, token streams
    python scripts/make_tiny_target.py train    --work build/tiny   # about an hour and a half on 2 CPU cores; resumes
    python scripts/make_tiny_target.py unloop   --work build/tiny   # unlikelihood on the model's own loops
    python scripts/make_tiny_target.py data     --work build/tiny   # prompts from unseen files, replies by the model
    python scripts/make_tiny_target.py package  --work build/tiny   # model card and files -> drafttrain/assets/

The text is the Python standard library and permissively licensed dependencies, read from the running interpreter.
Files are split by a hash of their path: 80 % train the target, 13 % give drafter prompts, 7 % are held out.
Everything is seeded; another Python or package version gives another corpus (its hash is in the model card).
"""

from __future__ import annotations

import argparse
import ast
import gzip
import hashlib
import json
import math
import random
import sys
import sysconfig
import textwrap
import time
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from drafttrain.data import InspectOptions
from drafttrain.data.contamination import copies
from drafttrain.data.prompts import load_prompts
from drafttrain.data.sources import Conversation
from drafttrain.decoding.guards import ends_in_loop

SEED = 20261121
VOCAB, CONTEXT = 2048, 2048
END_OF_TEXT, TURN_START, TURN_SEP, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_sep|>", "<|im_end|>"
MASK, PAD = "<|mask|>", "<|pad|>"
# The role ends in a special token, so that a reply that begins with blanks, as code does, shares no token with the text before.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '<|im_sep|>' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
)
# package -> (licence, megabytes of text at most)
SOURCES = {
    "stdlib": ("PSF-2.0", 14.0),
    "stdlib-tests": ("PSF-2.0", 5.0),
    "torch": ("BSD-3-Clause", 6.0),
    "transformers": ("Apache-2.0", 6.0),
    "datasets": ("Apache-2.0", 2.0),
    "peft": ("Apache-2.0", 2.0),
}
ASK = {
    "complete": "Complete this code.",
    "write": "Write the body of this function.",
    "document": "Write a docstring for this function.",
    "continue": "Continue this file.",
}


# ---------------------------------------------------------------- corpus


def source_files() -> dict[str, list[tuple[str, Path]]]:
    """(name, path) of every Python file per source, sorted by name."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    files: dict[str, list[tuple[str, Path]]] = {name: [] for name in SOURCES}
    for path in sorted(stdlib.rglob("*.py")):
        name = path.relative_to(stdlib).as_posix()
        if "site-packages" in name:
            continue
        is_test = any(part in ("test", "tests", "idle_test") for part in path.relative_to(stdlib).parts)
        files["stdlib-tests" if is_test else "stdlib"].append((f"stdlib/{name}", path))
    for package in ("torch", "transformers", "datasets", "peft"):
        spec = util.find_spec(package)
        assert spec and spec.submodule_search_locations, f"{package} is not installed"
        root = Path(spec.submodule_search_locations[0])
        files[package] = [(f"{package}/{p.relative_to(root).as_posix()}", p) for p in sorted(root.rglob("*.py"))]
    return files


def split_of(name: str) -> str:
    """The split that a file belongs to, from a hash of its name. Held-out files come from the standard library."""
    bucket = int(hashlib.sha256(name.encode()).hexdigest(), 16) % 100
    return "target" if bucket < 80 else "drafter" if bucket < 93 else "held_out"


def read_corpus() -> tuple[dict[str, list[tuple[str, str]]], str]:
    """Texts per split as (name, text), and the SHA-256 over all of them."""
    rng, digest = random.Random(SEED), hashlib.sha256()
    splits: dict[str, list[tuple[str, str]]] = {"target": [], "drafter": [], "held_out": []}
    for source, files in source_files().items():
        budget = SOURCES[source][1] * 1e6
        rng.shuffle(files)
        for name, path in files:
            try:
                text = path.read_text(encoding="ascii").expandtabs(4).replace("\r\n", "\n").strip()
            except UnicodeDecodeError:
                continue
            if not 400 <= len(text) <= 400_000 or budget < len(text):
                continue
            try:
                ast.parse(text)
            except (SyntaxError, ValueError):
                continue
            budget -= len(text)
            split = split_of(name)
            if split == "held_out" and source != "stdlib":  # near-copies live in the other packages
                split = "target"
            splits[split].append((name, text))
            digest.update(name.encode() + b"\0" + text.encode() + b"\0")
    return splits, digest.hexdigest()


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with the GPT-2 pre-tokenizer."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_SEP, TURN_END, MASK, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=TURN_END,
        pad_token=PAD,
        mask_token=MASK,
        extra_special_tokens=[END_OF_TEXT, TURN_START, TURN_SEP],
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tasks(text: str, rng: random.Random, per_file: int = 40) -> list[tuple[str, str, str]]:
    """(category, question, answer) cut from one source file."""
    lines, found = text.split("\n"), []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        size = source.count("\n") + 1
        if not 6 <= size <= 70 or len(source) > 2400 or source.count("\n") == 0:
            continue
        found.append((node, source))
    rng.shuffle(found)
    made: list[tuple[str, str, str]] = []
    for node, source in found[:per_file]:
        rows = source.split("\n")
        documented = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node)
        choice = rng.random()
        if documented and choice < 0.35:
            first, last = node.body[0].lineno - node.lineno, (node.body[0].end_lineno or 0) - node.lineno
            if len(node.body) < 2:
                continue
            if choice < 0.2:
                made.append(("write", "\n".join(rows[: last + 1]), "\n".join(rows[last + 1 :])))
            else:
                made.append(("document", "\n".join(rows[:first] + rows[last + 1 :]), "\n".join(rows[first : last + 1])))
        else:
            cut = rng.randint(max(2, len(rows) // 4), max(2, len(rows) // 2))
            made.append(("complete", "\n".join(rows[:cut]), "\n".join(rows[cut:])))
    starts = [n.lineno - 1 for n in ast.parse(text).body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    for start in rng.sample(starts, min(len(starts), max(1, per_file // 6))):
        before, after = lines[max(0, start - rng.randint(12, 30)) : start], lines[start : start + rng.randint(40, 70)]
        if len(before) >= 8 and len(after) >= 20 and len("\n".join(after)) < 3200:
            made.append(("continue", "\n".join(before).strip("\n"), "\n".join(after).rstrip()))
    return [(c, q, a.rstrip()) for c, q, a in made if q.strip() and a.strip()]


def conversation(category: str, question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{ASK[category]}\n\n{question}"}, {"role": "assistant", "content": answer}]


def chat_text(category: str, question: str, answer: str) -> str:
    """The chat template, rendered by hand; `corpus` checks the tokenizer's own against it."""
    user, reply = conversation(category, question, answer)
    return f"{TURN_START}user{TURN_SEP}{user['content']}{TURN_END}{TURN_START}assistant{TURN_SEP}{reply['content']}{TURN_END}"


def corpus(work: Path) -> None:
    splits, digest = read_corpus()
    rng = random.Random(SEED + 1)
    tokenizer = train_tokenizer([t for _, t in splits["target"]])
    tokenizer.save_pretrained(work / "tokenizer")
    probe = ("write", "def f(x):", "    return x")
    assert tokenizer.apply_chat_template(conversation(*probe), tokenize=False) == chat_text(*probe)
    end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    documents, chats = [], []
    for _, text in splits["target"]:
        documents.append(text + END_OF_TEXT)
        chats += [chat_text(*task) for task in tasks(text, rng)]
    rng.shuffle(documents)
    rng.shuffle(chats)
    streams = {}
    for name, texts in (("raw", documents), ("chat", chats)):
        ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
        streams[name] = np.concatenate([np.asarray(i, dtype=np.uint16) for i in ids])
    held = [t for _, t in splits["held_out"]]
    held_ids = [np.asarray([*i, end], dtype=np.uint16) for i in tokenizer(held, add_special_tokens=False)["input_ids"]]
    streams["held_out"] = np.concatenate(held_ids)
    np.savez(work / "tokens.npz", **streams)
    facts = {
        "python": sys.version.split()[0],
        "packages": {p: metadata.version(p) for p in ("torch", "transformers", "datasets", "peft")},
        "corpus_sha256": digest,
        "files": {k: len(v) for k, v in splits.items()},
        "bytes": {k: sum(len(t) for _, t in v) for k, v in splits.items()},
        "tokens": {k: len(v) for k, v in streams.items()},
        "conversations": len(chats),
        "held_out_bytes": sum(len(t) for t in held),
    }
    (work / "corpus.json").write_text(json.dumps(facts, indent=1))
    print(json.dumps(facts, indent=1))


# ---------------------------------------------------------------- training


class Muon:
    """Orthogonalised momentum for matrices of equal shape, batched over layers (Jordan et al. 2024; Newton-Schulz)."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        self.lr, self.momentum = lr, momentum
        shapes: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for p in parameters:
            shapes.setdefault(tuple(p.shape), []).append(p)
        self.groups = [(ps, torch.zeros(len(ps), *shape)) for shape, ps in shapes.items()]

    @torch.no_grad()
    def step(self, scale: float) -> None:
        for parameters, buffer in self.groups:
            gradient = torch.stack([p.grad for p in parameters if p.grad is not None])
            buffer.lerp_(gradient, 1 - self.momentum)
            update = self.orthogonalise(gradient.lerp(buffer, self.momentum))
            gain = max(1.0, update.shape[1] / update.shape[2]) ** 0.5
            for p, u in zip(parameters, update, strict=True):
                p.sub_(u, alpha=self.lr * scale * gain)

    @staticmethod
    def orthogonalise(x: torch.Tensor, steps: int = 5) -> torch.Tensor:
        a, b, c = 3.4445, -4.7750, 2.0315
        tall = x.shape[1] > x.shape[2]
        x = x.transpose(1, 2) if tall else x
        x = (x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)).bfloat16()
        for _ in range(steps):
            gram = x @ x.transpose(1, 2)
            x = a * x + (b * gram + c * gram @ gram) @ x
        return (x.transpose(1, 2) if tall else x).float()


def new_model(tokenizer: PreTrainedTokenizerFast, blocks: int) -> LlamaForCausalLM:
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=blocks,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.convert_tokens_to_ids(END_OF_TEXT),
        eos_token_id=[tokenizer.convert_tokens_to_ids(TURN_END), tokenizer.convert_tokens_to_ids(END_OF_TEXT)],
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def grow(small: LlamaForCausalLM, large: LlamaForCausalLM) -> None:
    """Copy `small` into `large`: each block is followed by copies that add nothing yet, since their output projections are 0."""
    state, factor = small.state_dict(), large.config.num_hidden_layers // small.config.num_hidden_layers
    grown = {k: v for k, v in state.items() if "layers." not in k}
    for name, value in state.items():
        if "layers." not in name:
            continue
        before, rest = name.split("layers.")
        index, tensor = rest.split(".", 1)
        for copy in range(factor):
            silent = copy > 0 and tensor in ("self_attn.o_proj.weight", "mlp.down_proj.weight")
            grown[f"{before}layers.{int(index) * factor + copy}.{tensor}"] = (
                torch.zeros_like(value) if silent else value.clone()
            )
    large.load_state_dict(grown)


class Batches:
    """Windows of the two streams. Each stream is read in order and started again at its end."""

    def __init__(self, work: Path) -> None:
        arrays = np.load(work / "tokens.npz")
        self.raw, self.chat, self.at = arrays["raw"], arrays["chat"], {"raw": 0, "chat": 0}

    def take(self, rows: int, length: int, chat_share: float) -> torch.Tensor:
        chats = round(rows * chat_share)
        return torch.stack([self._window("chat" if i < chats else "raw", length) for i in range(rows)])

    def _window(self, name: str, length: int) -> torch.Tensor:
        stream = getattr(self, name)
        if self.at[name] + length + 1 > len(stream):
            self.at[name] = 0
        window = stream[self.at[name] : self.at[name] + length + 1]
        self.at[name] += length
        return torch.from_numpy(window.astype(np.int64))


def bits_per_byte(model: nn.Module, work: Path, windows: int = 40) -> tuple[float, float]:
    """Held-out (bits per byte, perplexity per token) over evenly spaced windows of 512 tokens."""
    stream, facts = np.load(work / "tokens.npz")["held_out"].astype(np.int64), json.loads((work / "corpus.json").read_text())
    starts = np.linspace(0, len(stream) - 514, windows).astype(int)
    batch = torch.from_numpy(np.stack([stream[s : s + 513] for s in starts]))
    with torch.no_grad():
        losses = [F.cross_entropy(model(b[:, :-1]).logits.flatten(0, 1), b[:, 1:].flatten()).item() for b in batch.split(8)]
    nats = sum(losses) / len(losses)
    return nats / math.log(2) * len(stream) / facts["held_out_bytes"], math.exp(nats)


@dataclass(frozen=True)
class Stage:
    """Part of the training: a depth and the shape of its batches. The last stage decays the rate and ends on whole contexts."""

    blocks: int
    steps: int
    last: bool
    tokens: int = 8192  # of a batch

    def length(self, step: int) -> int:
        done = step / self.steps
        return 256 if not self.last or done < 0.6 else 512 if done < 0.92 else CONTEXT

    def rate(self, step: int) -> float:
        warm = min(1.0, (step + 1) / 40)
        return min(warm, max(0.02, (self.steps - step) / (0.6 * self.steps))) if self.last else warm


def train(work: Path, steps: list[int]) -> None:
    """Train a shallow model first (a step is three times cheaper), and grow it to full depth without changing its output."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(work / "tokenizer")
    stages = [Stage(4, steps[0], False), Stage(12, steps[1], True)]
    file, saved = work / "train-state.pt", None
    if file.exists():
        saved = torch.load(file, weights_only=True)
    model, batches, seen = None, Batches(work), 0
    for number, stage in enumerate(stages):
        if saved and saved["stage"] > number:
            continue
        grown = new_model(tokenizer, stage.blocks)
        if model is not None:
            grow(model, grown)
        model = grown
        seen = train_stage(model, stage, number, batches, work, seen, saved)
        saved = None


def train_stage(
    model: LlamaForCausalLM, stage: Stage, number: int, batches: Batches, work: Path, seen: int, saved: dict | None
) -> int:
    compiled = torch.compile(model, dynamic=False)
    others = [p for n, p in model.named_parameters() if p.ndim == 2 and "layers" not in n]
    norms = [p for p in model.parameters() if p.ndim == 1]
    muon = Muon([p for n, p in model.named_parameters() if p.ndim == 2 and "layers" in n], lr=0.02)
    groups = [{"params": others, "lr": 4e-3}, {"params": norms, "lr": 2e-3}]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    peaks, step, began = [g["lr"] for g in adamw.param_groups], 0, time.monotonic()
    if saved:
        model.load_state_dict(saved["model"])
        adamw.load_state_dict(saved["adamw"])
        for (_, buffer), was in zip(muon.groups, saved["muon"], strict=True):
            buffer.copy_(was)
        batches.at, seen, step = saved["at"], saved["seen"], saved["step"]
    log = (work / "train.log").open("a")
    while step < stage.steps:
        length = stage.length(step)
        batch, scale = batches.take(stage.tokens // length, length, chat_share=0.5), stage.rate(step)
        # short windows: matrix products beat the flash kernel of this CPU's torch
        model.set_attn_implementation("eager" if length < 512 else "sdpa")
        with torch.autocast("cpu", torch.bfloat16):
            logits = compiled(batch[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(others + norms, 1.0)
        for group, peak in zip(adamw.param_groups, peaks, strict=True):
            group["lr"] = peak * scale
        muon.step(scale)
        adamw.step()
        model.zero_grad(set_to_none=True)
        step, seen = step + 1, seen + stage.tokens
        if step % 20 == 0:
            rate = 20 * stage.tokens / (time.monotonic() - began)
            began = time.monotonic()
            print(
                f"stage {number} step {step}/{stage.steps} loss {loss.item():.3f} tokens {seen} tokens/s {rate:.0f}",
                file=log,
                flush=True,
            )
        if step % 200 == 0 or step == stage.steps:
            print(f"held out (bits per byte, perplexity): {bits_per_byte(model, work)}", file=log, flush=True)
            state = {"model": model.state_dict(), "adamw": adamw.state_dict(), "muon": [b for _, b in muon.groups]}
            state |= {"at": batches.at, "seen": seen, "step": step, "stage": number}
            torch.save(state, work / "train-state.tmp")
            (work / "train-state.tmp").rename(work / "train-state.pt")
            model.save_pretrained(work / "model")
            (work / "train.json").write_text(json.dumps({"stage": number, "step": step, "tokens": seen}))
    return seen


# ---------------------------------------------------------------- loops


def repeats(tokens: list[int], period_limit: int = 40) -> list[bool]:
    """Whether each token only continues a loop: it ends a third copy of a block, or a 16-token stretch of shorter copies."""
    flagged = [False] * len(tokens)
    for period in range(1, period_limit + 1):
        run = 0
        for t in range(period, len(tokens)):
            run = run + 1 if tokens[t] == tokens[t - period] else 0
            if run >= max(2 * period, 16):
                flagged[t - run + period + 1 : t + 1] = [True] * (run - period)
    return flagged


def generate(
    model: LlamaForCausalLM, prompts: list[list[int]], new_tokens: int, batch: int = 32, **sampling: float
) -> list[list[int]]:
    """Replies by transformers' generate, left-padded, cut after the stop token; longest prompts first, order restored."""
    stop, pad = set(model.config.eos_token_id), model.config.pad_token_id
    order, replies = sorted(range(len(prompts)), key=lambda i: -len(prompts[i])), {}
    for at in range(0, len(order), batch):
        chosen = order[at : at + batch]
        width = max(len(prompts[i]) for i in chosen)
        ids = torch.tensor([[pad] * (width - len(prompts[i])) + prompts[i] for i in chosen])
        mask = torch.tensor([[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in chosen])
        chance = {"do_sample": True, "top_k": 0, **sampling} if sampling else {"do_sample": False}
        out = model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, pad_token_id=pad, **chance)
        for i, row in zip(chosen, out[:, width:].tolist(), strict=True):
            end = next((k + 1 for k, t in enumerate(row) if t in stop), len(row))
            replies[i] = row[:end]
    return [replies[i] for i in range(len(prompts))]


def split_tasks(split: str, rng: random.Random, per_file: int) -> list[tuple[str, tuple[str, str, str]]]:
    """(file, task) of one split, shuffled."""
    found = [(name, task) for name, text in read_corpus()[0][split] for task in tasks(text, rng, per_file)]
    rng.shuffle(found)
    return found


def ask(tokenizer: PreTrainedTokenizerFast, task: tuple[str, str, str]) -> list[int]:
    messages = conversation(*task)[:1]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def replies_loss(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, chosen: list[tuple[str, str, str]]
) -> torch.Tensor:
    """Mean loss over answers. Their tokens follow the prompt's as in decoding: no token merges across the border."""
    pairs = [(ask(tokenizer, t), tokenizer(t[2] + TURN_END, add_special_tokens=False)["input_ids"][:160]) for t in chosen]
    width = max(len(q) + len(a) for q, a in pairs)
    ids = torch.tensor([q + a + [tokenizer.pad_token_id] * (width - len(q) - len(a)) for q, a in pairs])
    labels = torch.tensor([[-100] * len(q) + a + [-100] * (width - len(q) - len(a)) for q, a in pairs])
    return F.cross_entropy(model(ids[:, :-1]).logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def unloop(work: Path, rounds: int) -> None:
    """Sequence-level unlikelihood (Welleck et al. 2019): make the tokens less likely by which the model's own greedy text
    loops.

    Meanwhile the model keeps learning replies, tokenised as in decoding, and plain text.
    """
    tokenizer = PreTrainedTokenizerFast.from_pretrained(work / "tokenizer")
    model = LlamaForCausalLM.from_pretrained(work / "model")
    rng, batches, rate = random.Random(SEED + 2), Batches(work), 4e-4
    batches.at = torch.load(work / "train-state.pt", weights_only=True)["at"]
    pool = [(t, ids) for _, t in split_tasks("target", rng, 2) if len(ids := ask(tokenizer, t)) <= 224]
    adamw = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    log = (work / "unloop.log").open("a")
    for step in range(rounds):
        for group in adamw.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 5, (rounds - step) / (0.6 * rounds))
        asked = [pool[i % len(pool)] for i in range(step * 48, step * 48 + 48)]
        model.eval()
        replies = generate(model, [ids for _, ids in asked[:32]], 128)
        model.train()
        found = zip(asked[:32], replies, strict=True)
        guilty = [(ids, reply, flagged) for (_, ids), reply in found if any(flagged := repeats(reply))][:20]
        text = batches.take(4, 512, chat_share=0.5)
        loss = F.cross_entropy(model(text[:, :-1]).logits.flatten(0, 1), text[:, 1:].flatten())
        answers = replies_loss(model, tokenizer, [t for t, _ in asked[32:]])
        (loss + answers).backward()
        for prompt, reply, flagged in guilty:
            ids = torch.tensor([prompt + reply])
            chance = model(ids[:, :-1]).logits[0, len(prompt) - 1 :].softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
            push = -torch.log1p(-chance[torch.tensor(flagged)].clamp_max(0.999)).mean() / len(guilty)
            push.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        share = sum(map(ends_in_loop, replies)) / len(replies)
        line = f"round {step + 1}/{rounds} text {loss.item():.3f} replies {answers.item():.3f} loops {share:.2f}"
        print(line, file=log, flush=True)
    model.eval()
    model.to(torch.bfloat16).save_pretrained(work / "final")
    print(f"held out: {bits_per_byte(model.float(), work)}", file=log, flush=True)


# ---------------------------------------------------------------- prompts and replies


def data(work: Path, conversations: int, questions: int) -> None:
    """Training conversations from the drafter's files, replies by the model; evaluation prompts from held-out files."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(work / "tokenizer")
    model = LlamaForCausalLM.from_pretrained(work / "final", dtype=torch.float32).eval()
    rng = random.Random(SEED + 3)
    torch.manual_seed(SEED + 3)
    # Short prompts: the target reads them at every training step, and only replies are learnt from. Two passes cut each
    # file's functions at different lines.
    cuts = dict.fromkeys(split_tasks("drafter", rng, 120) + split_tasks("drafter", rng, 120))
    asked = [(t, ids) for t, ids in ((t, ask(tokenizer, t)) for _, t in cuts) if len(ids) <= 160][:conversations]
    prompts, greedy = [ids for _, ids in asked], len(asked) * 4 // 5
    replies = generate(model, prompts[:greedy], 144, batch=64)
    replies += generate(model, prompts[greedy:], 144, batch=64, temperature=0.8)
    kept = []
    for (task, _), reply in zip(asked, replies, strict=True):
        answer = tokenizer.decode(reply, skip_special_tokens=True)
        if answer.strip() and len(reply) >= 16 and not ends_in_loop(reply):
            kept.append(conversation(task[0], task[1], answer))
    rng.shuffle(kept)
    asked_later = questions_from(work, tokenizer, model, questions)
    written = len(kept)
    kept = unlike(kept, work / "prompts.jsonl")
    # mtime 0: the same conversations give the same bytes
    with (work / "train.jsonl.gz").open("wb") as file, gzip.GzipFile(fileobj=file, mode="wb", mtime=0) as packed:
        packed.write("".join(json.dumps({"messages": c}) + "\n" for c in kept).encode())
    facts = {"conversations": len(kept), "looping_or_short_replies_left_out": len(replies) - written}
    facts |= {"like_an_evaluation_prompt_left_out": written - len(kept)}
    (work / "data.json").write_text(json.dumps(facts | asked_later, indent=1))


def unlike(conversations: list[list[dict[str, str]]], prompts: Path) -> list[list[dict[str, str]]]:
    """The conversations in which `drafttrain inspect` finds no evaluation prompt, since packages copy each other's code."""
    asked, how = load_prompts(str(prompts), None), InspectOptions()
    return [c for c in conversations if not copies(asked, [Conversation("", tuple(c))], how.ngram, how.overlap)]


def questions_from(
    work: Path, tokenizer: PreTrainedTokenizerFast, model: LlamaForCausalLM, questions: int
) -> dict[str, object]:
    """Write the evaluation prompts; return facts about the model's greedy answers to them and to all candidates."""
    rng = random.Random(SEED + 4)
    candidates = [(n, t) for n, t in split_tasks("held_out", rng, 40) if 24 <= len(ask(tokenizer, t)) <= 256]
    candidates = [c for c in candidates if c[1][0] != "document"][: 6 * questions]
    outputs = generate(model, [ask(tokenizer, t) for _, t in candidates], 128, batch=64)
    # Answers that use all 128 tokens first, so that acceptance rests on as many as can be. Those are the ones that loop,
    # and a loop is accepted whole: they may be no larger a share than they are of all answers. The sort is stable.
    looping, full = [ends_in_loop(o) for o in outputs], [len(o) == 128 for o in outputs]
    spare = round(sum(looping) / len(outputs) * questions)
    ranks = [2 if looping[i] and sum(looping[:i]) >= spare else 1 - full[i] for i in range(len(outputs))]
    order = sorted(range(len(candidates)), key=lambda i: ranks[i])[:questions]
    prompts = []
    for i in order:
        name, task = candidates[i]
        turn = conversation(*task)[0]["content"]
        prompts.append({"question_id": len(prompts) + 1, "category": task[0], "file": name, "turns": [turn]})
    (work / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    chosen = [outputs[i] for i in order]
    (work / "samples.txt").write_text("\n=====\n".join(tokenizer.decode(o) for o in chosen))
    return {
        "prompts": len(prompts),
        "prompt_files": len({p["file"] for p in prompts}),
        "full_length_outputs": sum(len(o) == 128 for o in chosen),
        "loop_share": sum(map(ends_in_loop, chosen)) / len(chosen),
        "candidates": len(candidates),
        "candidate_loop_share": sum(map(ends_in_loop, outputs)) / len(outputs),
    }


# ruff: noqa: E501
CARD = """---
license: apache-2.0
---
# The embedded target

A small Llama-architecture causal LM that drafttrain ships, so that a first run needs no download. It writes Python-like text; it is
a fixture for drafters and their decoder, not a model to use for anything else.

| | |
|---|---|
| parameters | {parameters:,} ({blocks} blocks, hidden {hidden}, {heads} heads over {kv_heads} KV heads of 32, untied head, context {context}) |
| tokenizer | byte-level BPE, {vocab} tokens, GPT-2 pre-tokenizer, ChatML-like template with generation marks (the role ends in `<|im_sep|>`), reserved `<|mask|>` |
| training tokens seen | {tokens:,} |
| text | {files:,} Python files, {megabytes:.1f} MB: the standard library of Python {python} (PSF-2.0); {packages} |
| held out | {held_files} standard-library files: perplexity {perplexity:.1f} per token, {bits:.2f} bits per byte |
| greedy outputs of 128 tokens that end in a loop | {candidate_loop_share:.0%} of {candidates} held-out prompts, {loop_share:.0%} of the {prompts} chosen from them for evaluation |
| corpus SHA-256 | `{sha}` |

Made by `python scripts/make_tiny_target.py corpus|train|unloop|data|package` (seeded; `--help` tells each stage). A model of four blocks
was trained first ({shallow:,} steps of 8,192 tokens) and grown to full depth ({deep:,} steps, windows of 256, then 512 tokens, the last
8 % whole contexts); then loops in the model's own greedy text were pushed down ({rounds} rounds of sequence-level unlikelihood).

Files are split by a hash of their name. Beside the model lie `train.jsonl.gz`, {conversations:,} conversations whose questions come
from {drafter_files} files that the model never saw and whose replies are the model's own (four of five greedy, the others at temperature 0.8), and `prompts.jsonl`, {prompts} questions from {prompt_files} held-out files that neither model nor drafters saw, those first whose greedy answer
uses all 128 tokens ({full} of them), and loops no more often than over all held-out prompts. Conversations that hold half of an evaluation prompt are left out.

Weights, tokenizer and replies: Apache-2.0. The questions quote the standard library (PSF-2.0, (c) Python Software Foundation) and
{packages}.
"""


def package(work: Path, steps: list[int], rounds: int) -> None:
    """The model card, and all files into drafttrain/assets."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(work / "tokenizer")
    model = LlamaForCausalLM.from_pretrained(work / "final", dtype=torch.float32).eval()
    corpus_facts, data_facts = (json.loads((work / f"{n}.json").read_text()) for n in ("corpus", "data"))
    bits, perplexity = bits_per_byte(model, work)
    config, assets = model.config, Path(__file__).resolve().parents[1] / "drafttrain" / "assets"
    tiny = assets / "tiny"
    tiny.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(tiny)
    LlamaForCausalLM.from_pretrained(work / "final", dtype=torch.bfloat16).save_pretrained(tiny)
    for name in ("train.jsonl.gz", "prompts.jsonl"):
        (assets / name).write_bytes((work / name).read_bytes())
    packages = ", ".join(f"{p} {v} ({SOURCES[p][0]})" for p, v in corpus_facts["packages"].items())
    card = CARD.format(
        parameters=sum(p.numel() for p in model.parameters()),
        blocks=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        context=CONTEXT,
        vocab=VOCAB,
        tokens=json.loads((work / "train.json").read_text())["tokens"],
        files=corpus_facts["files"]["target"],
        megabytes=corpus_facts["bytes"]["target"] / 1e6,
        python=corpus_facts["python"],
        packages=packages,
        held_files=corpus_facts["files"]["held_out"],
        perplexity=perplexity,
        bits=bits,
        loop_share=data_facts["loop_share"],
        candidate_loop_share=data_facts["candidate_loop_share"],
        candidates=data_facts["candidates"],
        sha=corpus_facts["corpus_sha256"],
        conversations=data_facts["conversations"],
        drafter_files=corpus_facts["files"]["drafter"],
        prompts=data_facts["prompts"],
        full=data_facts["full_length_outputs"],
        shallow=steps[0],
        deep=steps[1],
        rounds=rounds,
        prompt_files=data_facts["prompt_files"],
    )
    (tiny / "README.md").write_text(card)
    print(card)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["corpus", "train", "unloop", "data", "package"])
    parser.add_argument("--work", type=Path, default=Path("build/tiny"))
    parser.add_argument("--steps", type=int, nargs=2, default=[2600, 1000], help="of the shallow and of the deep stage")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=64, help="of unloop")
    parser.add_argument("--conversations", type=int, default=6000, help="before looping ones are left out")
    parser.add_argument("--questions", type=int, default=56)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    if args.stage == "corpus":
        corpus(args.work)
    elif args.stage == "train":
        train(args.work, args.steps)
    elif args.stage == "unloop":
        unloop(args.work, args.rounds)
    elif args.stage == "data":
        data(args.work, args.conversations, args.questions)
    else:
        package(args.work, args.steps, args.rounds)


if __name__ == "__main__":
    main()
