"""What the Python API promises beyond the examples."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import drafttrain as dt
from drafttrain.data.files import ASSETS
from drafttrain.measure import report


@pytest.fixture(scope="module")
def target() -> dt.LoadedTarget:
    return dt.load_target()


@pytest.fixture(scope="module")
def conversations() -> list[dict[str, Any]]:
    with gzip.open(ASSETS / "train.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in islice(file, 24)]


def test_train_drafter_equals_fit_command_bitwise(
    target: dt.LoadedTarget, conversations: list[dict[str, Any]], command: Callable[..., int], tmp_path: Path
) -> None:
    """The same losses and weights, bit by bit."""
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in conversations), encoding="utf-8")
    shared = ("train.steps=2", "train.global_batch=4", "data.held_out=3", "logger=none", "measure=off", "decode.tree_nodes=6")
    assert command("fit", "recipe=medusa", "drafter.heads=2", f"data.path={file}", "output=typed", *shared) == 0
    drafter = dt.build_drafter("medusa", target, heads=2)
    before = {name: tensor.clone() for name, tensor in drafter.module.state_dict().items()}
    asked: dict[str, Any] = {"steps": 2, "batch": 4, "settings": {"decode.tree_nodes": 6}}
    run = dt.train_drafter(drafter, conversations, out="called", quiet=True, **asked)
    (typed,) = (tmp_path / "typed").glob("medusa/*")
    lines = (typed / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert run.losses == [json.loads(line)["loss"] for line in lines] and len(run.losses) == 2
    ours, theirs = (dt.load_drafter(path, target).module for path in (run.checkpoint, typed / "checkpoints/step-00002"))
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True))
    assert all(torch.equal(tensor, before[name]) for name, tensor in drafter.module.state_dict().items())
    assert run.expected_tau is not None and run.checkpoint in run.checkpoints


@pytest.mark.slow
def test_api_user_training_loop_lowers_loss_and_saves_drafter(
    target: dt.LoadedTarget, conversations: list[dict[str, Any]], tmp_path: Path
) -> None:
    drafter = dt.build_drafter("eagle3", target, draft_vocab=256, steps=2)
    optimizer, losses = torch.optim.AdamW(drafter.module.parameters(), lr=3e-3), []
    for batch in dt.batches(drafter, conversations, batch_size=8, epochs=3):
        value = dt.loss(drafter, target, batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    assert len(losses) == 9 and losses[-1] < losses[0]
    path = dt.save_drafter(drafter, tmp_path / "own", step=9)
    with pytest.raises(dt.UserError, match="exists"):
        dt.save_drafter(drafter, path)
    loaded = dt.load_drafter(path, target)
    with pytest.raises(dt.UserError, match="trainable=True"):
        dt.loss(loaded, target, batch)
    again = dt.load_drafter(path, target, trainable=True)
    assert dt.loss(again, target, batch).item() == dt.loss(drafter, target, batch).item()
    run = dt.train_drafter(again, conversations, steps=1, out=tmp_path, quiet=True)
    assert run.losses[0] < losses[0], "it goes on from the weights"
    (tmp_path / "chat.jinja").write_text("{% for message in messages %}@@@{{ message.content }}@@@{% endfor %}")
    template = {"data.template": str(tmp_path / "chat.jinja")}
    other = next(dt.batches(drafter, conversations, settings=template))
    assert "@@@" in target.tokenizer.decode(other.token_BT[0]) and "@@@" not in target.tokenizer.decode(batch.token_BT[0])
    parts = [dt.loss(drafter, target, batch, name=name).item() for name in ("kl", "ce")]
    mixed = dt.loss(drafter, target, batch, name="mix", settings={"loss.mix": {"kl": 0.5, "ce": 0.25}})
    assert mixed.item() == pytest.approx(0.5 * parts[0] + 0.25 * parts[1], rel=1e-5)


@pytest.mark.slow
def test_measure_drafter_medusa2_decodes_with_adapted_target(
    target: dt.LoadedTarget, conversations: list[dict[str, Any]], tmp_path: Path
) -> None:
    drafter = dt.build_drafter("medusa2", target, heads=2)
    with pytest.raises(dt.UserError, match="medusa2 also trains the target; use train_drafter"):
        dt.loss(drafter, target, next(dt.batches(drafter, conversations)))
    run = dt.train_drafter(drafter, conversations, steps=1, batch=2, out=tmp_path, quiet=True)
    loaded = dt.load_drafter(run.checkpoint, target)
    assert loaded.base is target and loaded.target is not target
    with pytest.raises(dt.UserError, match=r"train\.init"):
        dt.load_drafter(run.checkpoint, target, trainable=True)
    settings = {"decode": "sampling", "measure.batch_sizes": [1]}
    asked: dict[str, Any] = {"prompts": ["def area(side):"], "max_new_tokens": 6, "minutes": 0.02, "settings": settings}
    figures = dt.measure_drafter(target, loaded, out=tmp_path / "report", quiet=True, **asked)
    assert figures.exact is None and figures.report["checkpoints"][0]["policy"] == "lossless"


@pytest.mark.grid
def test_train_drafter_two_processes_have_losses_of_one(conversations: list[dict[str, Any]], tmp_path: Path) -> None:
    """The losses of one process, on both. In CI the command proves it, and training by the API is that of the command."""
    (tmp_path / "rows.json").write_text(json.dumps(conversations), encoding="utf-8")
    (tmp_path / "run.py").write_text(
        "import json, os, sys, drafttrain as dt\n"
        "drafter, rows = dt.build_drafter('medusa', dt.load_target(), heads=2), json.load(open('rows.json'))\n"
        "run = dt.train_drafter(drafter, rows, steps=2, batch=4, out=sys.argv[1], quiet=True)\n"
        "json.dump(run.losses, open(f'{sys.argv[1]}-{os.environ.get(\"RANK\", 0)}.json', 'w'))\n",
        encoding="utf-8",
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "run.py", "two"]
    for words in (torchrun, [sys.executable, "run.py", "one"]):
        process = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.DEVNULL, start_new_session=True)
        try:
            assert process.wait(300) == 0
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # torchrun and the ranks that it started
            raise
    one, first, second = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one-0", "two-0", "two-1"))
    assert first == second == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_generate_with_drafter_equals_plain_decoding(target: dt.LoadedTarget, temperature: float) -> None:
    drafter = dt.build_drafter("prompt_lookup", target)
    asked: dict[str, Any] = {"max_new_tokens": 14, "temperature": temperature, "policy": "coupled" if temperature else None}
    prompts = ["def area(side):", [{"role": "user", "content": "def area(side):"}], [300, 301, 302]]
    ours = dt.generate(target, drafter, prompts, batch_size=2, **asked)
    plain = dt.generate(target, None, prompts, batch_size=2, **asked)  # sampled choices are equal up to rounding of the logits
    assert [text.tokens for text in ours] == [text.tokens for text in plain]
    assert ours[0].tokens == ours[1].tokens or temperature
    assert all(sum(text.accepted) + len(text.accepted) >= len(text.tokens) - 1 for text in ours)
    assert not plain[0].accepted and plain[0].ended_by in ("length", "stop")


def test_suffix_drafter_without_training_is_saved_and_measured(
    target: dt.LoadedTarget, conversations: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "_figures", lambda *asked: [])  # nobody looks at the pictures
    drafter = dt.build_drafter("suffix", target)
    run = dt.train_drafter(drafter, conversations, out=tmp_path, quiet=True)
    assert run.losses == [] and run.expected_tau is None and run.checkpoint.name == "step-00000"
    figures = dt.measure_drafter(
        target, drafter, prompts=["def area(side):"], max_new_tokens=8, minutes=0.02, out=tmp_path / "report", quiet=True
    )
    assert figures.exact and figures.prompts == figures.exact_matches == 1
    assert figures.report["measure"]["prompts"] == str(tmp_path / "report" / "prompts.jsonl")
    with pytest.raises(dt.UserError, match="trains nothing"):
        next(dt.batches(drafter, conversations))


def test_api_mistake_raises_user_error_of_one_line(
    target: dt.LoadedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    monkeypatch.chdir(tmp_path)
    medusa, nowhere = dt.build_drafter("medusa", target), "no/such/directory/here"
    misspelt = {"train.step": 1}
    for line, call in (
        ("does not exist", lambda: dt.load_target(nowhere)),
        ("did you mean medusa", lambda: dt.build_drafter("medusaa", target)),
        ("unknown key 'drafter.head'; did you mean drafter.heads", lambda: dt.build_drafter("medusa", target, head=2)),
        ("drafter.heads", lambda: dt.build_drafter("medusa", target, heads="many")),
        ("no conversations", lambda: dt.train_drafter(medusa, [])),
        ("conversation 1 is a str", lambda: dt.train_drafter(medusa, ["hello"])),  # type: ignore[list-item]
        ("did you mean train.steps", lambda: dt.train_drafter(medusa, [{"no": 1}], settings=misspelt)),
        ("a prompt is empty", lambda: dt.generate(target, None, [""])),
        ("unknown option 'top_q' of generate; did you mean top_p", lambda: dt.generate(target, None, ["a"], top_q=1)),
        ("exceed the target's", lambda: dt.generate(target, None, ["a"], max_new_tokens=10**6)),
        ("expected a checkpoint", lambda: dt.load_drafter(nowhere, target)),
        ("expected a checkpoint", lambda: dt.export_drafter(nowhere, "vllm", "out", target=target)),
        ("launcher=slurm is for the command line", lambda: dt.auto(settings={"launcher": "slurm"})),
    ):
        with subtests.test(line):
            with pytest.raises(dt.UserError) as caught:
                call()
            assert line in str(caught.value) and "\n" not in str(caught.value)
            assert not list(tmp_path.iterdir())


def test_auto_runs_the_command_without_asking_and_returns_its_decision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[tuple[Any, list[str]]]()

    def decide(options: Any, words: list[str], compose: Callable[[str, list[str]], Any]) -> Path:
        seen.append((options, words))
        (tmp_path / "auto.json").write_text(f'{{"recipe": "{compose("medusa", ["auto.yes=true"]).name}"}}')
        return tmp_path

    monkeypatch.setattr("drafttrain.commands.auto.auto", decide)
    decision = dt.auto(conversations="talk.jsonl", stacks=["vllm"], budget="2h", settings={"auto.batch_sizes": [1]})
    ((options, words),) = seen
    assert decision == {"recipe": "medusa", "folder": tmp_path}
    assert options.auto.yes and options.auto.batch_sizes == [1] and options.budget == "2h" and options.export.stacks == ["vllm"]
    assert "data.path='talk.jsonl'" in words
