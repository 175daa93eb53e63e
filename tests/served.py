"""A checkpoint that is measured in moments, and a server that stands for those of other people."""

from __future__ import annotations

import dataclasses
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from drafttrain.drafters import families
from drafttrain.drafters.checkpoint import CheckpointMeta, save_drafter
from tests.exports import embedded, record_of

SMALL = (
    *("measure.limit=2", "decode.max_new_tokens=10", "measure.batch_sizes=[1]", "measure.repeats=2"),
    *("measure.transformers=false", "measure.minutes=10"),
)


def untrained(directory: Path) -> Path:
    """A draft model of the embedded target: all its blocks but two, untrained, with three drafts."""
    family, target = families()["draft_model"], embedded()
    options = family.options(blocks=10, draft_length=3)
    directory.mkdir()
    meta = CheckpointMeta("draft_model", dataclasses.asdict(options), {}, record_of(target), step=1)
    save_drafter(directory, family.build(options, target.target).state_dict(), meta)
    return directory


class Fake:
    """An OpenAI-compatible server of four tokens a text, three of them from two verifications of three drafts.

    counts: as `vllm`, as an `older` vLLM without positions, as `sglang`, as SGLang `answers` it, or None: not at all. others:
    tokens that it generates for somebody else meanwhile. context: its tokens, where it tells them. lost: texts that its
    counters forget, as after a restart.
    """

    def __init__(self, counts: str | None = None, others: int = 0, refuse: int = 0, context: int | None = None) -> None:
        self.context = context
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.texts, self.counts, self.others, self.refuse, self.lost = 0, counts, others, refuse, 0
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), self.handler())
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def metrics(self) -> str:
        """Two engines' counters. The names and labels are those of vLLM 0.32 and of SGLang 0.5.23."""
        texts, maker = self.texts - self.lost, "sglang" if self.counts == "sglang" else "vllm"
        made = {"generation_tokens_total": 4 * texts + self.others * texts}
        if maker == "vllm":
            named = {"drafts": 2, "draft_tokens": 6, "accepted_tokens": 1}
            made |= {f"spec_decode_num_{name}_total": n * texts for name, n in named.items()}
        else:
            made["spec_verify_calls_total"] = 2 * texts
        labels = 'engine="{i}",model_name="tiny"'
        lines = [f"{maker}:{name}{{{labels}}} {value / 2}" for name, value in made.items()]
        if self.counts == "vllm":
            name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            lines += [f'{name}{{{labels},position="{at}"}} {n * texts / 2}' for at, n in enumerate((1, 0, 0))]
            lines.append(f'vllm:spec_decode_num_accepted_tokens_per_pos_created{{{labels},position="0"}} 1.7e+09')
        each = [line.replace("{i}", str(i)) for line in lines for i in range(2)]
        return "\n".join(["# HELP x of nothing", "process_start_time_seconds 100", *each])

    def details(self) -> dict[str, Any]:
        """SGLang's counts of one answer: one step without an accepted draft, one with one."""
        counted = {"spec_verify_ct": 2, "spec_num_proposed_drafts": 6, "spec_num_correct_drafts": 1}
        counted |= {"spec_correct_drafts_histogram": [1, 1], "spec_accept_length": 2.0, "spec_cap_lens_histogram": []}
        return {"choices": [], "sglext": {"routed_experts": None, "spec_tokens_details": counted}}

    def handler(fake) -> type[BaseHTTPRequestHandler]:  # noqa: N805
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments: Any) -> None:
                pass

            def do_GET(self) -> None:
                fake.keys.add(self.headers.get("Authorization"))
                maker = "sglang" if fake.counts == "answers" else "fake"
                known = {
                    "/v1/models": json.dumps({"data": [{"id": "tiny", "owned_by": maker, "max_model_len": fake.context}]}),
                    "/version": '{"version": "7"}',
                }
                if fake.counts not in (None, "answers"):
                    known["/metrics"] = fake.metrics()
                self.give(200 if self.path in known else 404, known.get(self.path, ""))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                fake.bodies.append(body | {"path": self.path})
                if fake.refuse:
                    self.give(fake.refuse, '{"error": "so it is"}')
                    return
                pieces = ["", "one", " two", " three"]
                parts = [{"choices": [{"text": p} if "prompt" in body else {"delta": {"content": p}}]} for p in pieces]
                if body.get("return_spec_tokens_details"):
                    parts.append(fake.details())
                parts.append({"choices": [], "usage": {"completion_tokens": 4}})
                fake.texts += 1
                self.give(200, "".join(f"data: {json.dumps(part)}\n\n" for part in parts) + "data: [DONE]\n\n")

            def give(self, status: int, content: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content.encode())

        return Handler
