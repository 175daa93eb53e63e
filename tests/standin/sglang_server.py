"""A stand-in for `sglang.launch_server`: `/generate` with states as SGLang 0.5.23 gives them, and SpecForge's capture of 0.2.0.

`python -m tests.standin.sglang_server TARGET PORT ARGUMENTS [FAULTS]` serves as a process; ARGUMENTS is a JSON object of
`Arguments`.

Written from the source of both. What it keeps of SGLang:

- A server returns the state after the last norm, or with `enable_return_aux_hidden_states` the outputs of the blocks that
  `return_aux_hidden_state_layer_ids` names, concatenated in the order of the model whatever the order of the ids.
- Id b is kept as b + 1, and an output is taken where the block after it reads it. So most models never take the last block's,
  and the first forward then ends the scheduler.
- A prompt whose beginning is in the radix cache, under the same `extra_key`, is computed from there on, and only the computed
  tokens have states. The last token is always computed. A prompt that is computed in chunks has the states of the last one.
- States are lists of one list for the prompt and one for every further token, cut to the number of tokens that were generated.
- Values that are not finite are written as null, as orjson does.

FAULTS is a JSON object: the number of a request (from 0) to one of

    status      answers with 500
    busy        answers with 503 and FastAPI's body
    drop        closes the connection without an answer
    abort       ends the request with a finish_reason of type abort
    nan         one value is not a number
    ids         the states of other token ids
    another     the answer to another request
    early       the final state is that of one block before
    die         the process ends at once
    lost        of capture: the object is not in the store, as of a store that was started again

Shapes: T tokens, W values of all states of a token.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.standin.states_server import Handler, serving

FINAL = -1
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
Compute = Callable[[list[int]], Mapping[int, Tensor]]  # token ids to [T, H] by block, and FINAL


@dataclass
class Arguments:
    """Arguments of a server, by SGLang's names, after it has resolved them."""

    return_hidden_states_mode: str | None = None
    enable_return_hidden_states: bool = False
    enable_return_aux_hidden_states: bool = False
    return_aux_hidden_state_layer_ids: list[int] | None = None
    aux_hidden_state_capture: str | None = None
    chunked_prefill_size: int = -1
    disable_radix_cache: bool = False
    context_length: int = 4096
    allow_auto_truncate: bool = False

    def __post_init__(self) -> None:
        """SGLang's own resolution of these arguments."""
        if self.enable_return_aux_hidden_states:
            self.aux_hidden_state_capture = self.aux_hidden_state_capture or "eagle3"
        if self.return_hidden_states_mode is None:
            if self.enable_return_hidden_states or self.enable_return_aux_hidden_states:
                self.return_hidden_states_mode = "full"
        else:
            self.enable_return_hidden_states = True

    @property
    def max_req_input_len(self) -> int:
        """A prompt must have fewer tokens."""
        return self.context_length - 1 - 5


@dataclass
class Patched(Arguments):
    """Arguments of a server with SpecForge's patch, which stands on 0.5.14."""

    enable_spec_capture: bool = True
    spec_capture_aux_layer_ids: list[int] | None = None
    spec_capture_method: str = "eagle3"


class RefusedError(Exception):
    """A request that SGLang answers with an error."""


class DiedError(Exception):
    """The scheduler has ended, and the server with it."""


@dataclass
class StandIn:
    """A server. last: whether the model gives its last block's output, as Gemma 3 does and Llama does not.

    put: puts an object's bytes into Mooncake's store.
    """

    compute: Compute
    arguments: Arguments
    faults: dict[int, str] = field(default_factory=dict)
    last: bool = False
    put: Callable[[str, Tensor], None] | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    lock: Any = field(default_factory=threading.Lock)
    cached: dict[str | None, list[list[int]]] = field(default_factory=dict)  # prompts by extra_key
    died: bool = False

    def get(self, path: str) -> tuple[int, Any]:
        """The answer to a GET."""
        if path == "/health":
            return 200, {}
        if path in ("/model_info", "/get_model_info"):
            return 200, {"model_path": "target", "is_generation": True, "weight_version": "default"}
        if path in ("/server_info", "/get_server_info"):
            version = "0.5.14" if isinstance(self.arguments, Patched) else "0.5.23"
            room = self.arguments.max_req_input_len
            return 200, {**asdict(self.arguments), "max_req_input_len": room, "internal_states": [{}], "version": version}
        return 404, {"detail": "Not Found"}

    def complete(self, handler: Handler, body: dict[str, Any]) -> None:
        """Answer a request of `/generate`."""
        with self.lock:
            fault = self.faults.get(len(self.requests), "")
            self.requests.append(body)
        if fault == "die":
            os._exit(9)
        if fault == "drop" or self.died:
            handler.close_connection = True
            handler.connection.close()
        elif fault == "status":
            handler.answer(500, {"error": {"message": "Internal Server Error"}})
        elif fault == "busy":
            handler.answer(503, {"detail": "The request queue is full."})
        else:
            try:
                handler.answer(200, self._generated(body, fault))
            except RefusedError as error:
                handler.answer(400, {"error": {"message": str(error)}})
            except DiedError:
                self.died = handler.close_connection = True
                handler.connection.close()

    def _generated(self, body: dict[str, Any], fault: str) -> dict[str, Any]:
        ids, sampling = list(body["input_ids"]), body.get("sampling_params") or {}
        wanted, capture = body.get("return_hidden_states", False), body.get("spec_capture")
        self._validated(ids, wanted)
        about = {"id": "another" if fault == "another" else body["rid"], "prompt_tokens": len(ids), "weight_version": "default"}
        about |= {"finish_reason": {"type": "length", "length": sampling["max_new_tokens"]}, "num_retractions": 0}
        if fault == "abort":
            about["finish_reason"] = {"type": "abort", "message": "Aborted", "status_code": None}
            return {"text": "", "output_ids": [], "meta_info": about}
        found = dict(self.compute([(i + 1) % 32 for i in ids] if fault == "ids" else ids))
        if fault == "nan":
            found = {key: state_TH.index_fill(0, torch.tensor(len(ids) - 1), torch.nan) for key, state_TH in found.items()}
        if fault == "early":
            found[FINAL] = found[max(found) - 1]
        hits = self._hits(body.get("extra_key"), ids)
        chunk = self.arguments.chunked_prefill_size
        begin = len(ids) - ((len(ids) - hits - 1) % chunk + 1) if chunk > 0 else hits
        about |= {"completion_tokens": max(1, sampling["max_new_tokens"]), "cached_tokens": hits, "reasoning_tokens": 0}
        if wanted is True:
            rows = [_listed(self._aux(found)[begin:])]
            rows += [rows[0][-1]] * (sampling["max_new_tokens"] - 1)
            about["hidden_states"] = rows[: sampling["max_new_tokens"]]
        if capture is not None and isinstance(self.arguments, Patched):
            about["spec_capture"] = self._captured(capture, found, begin, fault)
        answer = {"text": " a", "output_ids": [1], "meta_info": about}
        if body.get("return_prompt_token_ids"):
            answer["prompt_token_ids"] = [(i + 1) % 32 for i in ids] if fault == "ids" else ids
        return answer

    def _validated(self, ids: list[int], wanted: Any) -> None:
        room, most = self.arguments.context_length, self.arguments.max_req_input_len
        if len(ids) >= room and not self.arguments.allow_auto_truncate:
            raise RefusedError(f"The input ({len(ids)} tokens) is longer than the model's context length ({room} tokens).")
        if len(ids) >= most and not self.arguments.allow_auto_truncate:
            raise RefusedError(
                f"Input length ({len(ids)} tokens) exceeds the maximum allowed length ({most} tokens). Use a shorter input or "
                "enable --allow-auto-truncate."
            )
        if wanted not in (False, True, "last"):
            raise RefusedError("return_hidden_states must be a boolean or the string literal 'last'.")
        if wanted and self.arguments.return_hidden_states_mode is None:
            raise RefusedError(
                "The server is not configured to return hidden states. Please set `--return-hidden-states-mode last`, "
                "`--return-hidden-states-mode full`, or the legacy `--enable-return-hidden-states` flag."
            )
        if wanted is True and self.arguments.return_hidden_states_mode == "last":
            raise RefusedError(
                "The requested return_hidden_states mode exceeds the server maximum `last`. Please launch with "
                "`--return-hidden-states-mode full` to allow return_hidden_states=True."
            )

    def _hits(self, extra_key: str | None, ids: list[int]) -> int:
        """Tokens of the prompt's beginning that are in the cache."""
        if self.arguments.disable_radix_cache:
            return 0
        with self.lock:
            prompts = self.cached.setdefault(extra_key or None, [])
            longest = max((_common(prompt, ids) for prompt in prompts), default=0)
            prompts.append(ids)
        return min(longest, len(ids) - 1)

    def _aux(self, found: Mapping[int, Tensor]) -> Tensor:
        """[T, W] what a forward keeps."""
        arguments = self.arguments
        if isinstance(arguments, Patched):
            ids = arguments.spec_capture_aux_layer_ids
        elif not arguments.enable_return_aux_hidden_states:
            return found[FINAL]
        else:
            ids = arguments.return_aux_hidden_state_layer_ids
        blocks = max(found) + 1
        inputs = [2, blocks // 2, blocks - 3] if ids is None else [i + 1 for i in ids]
        taken = [found[i - 1] for i in range(1, blocks + self.last) if i in inputs]
        if not isinstance(arguments, Patched) and ids is not None and len(taken) != len(ids):  # ids of a draft are not counted
            raise DiedError(f"The model captured {len(taken)} aux hidden states")
        return torch.cat(taken, -1)

    def _captured(self, spec: dict[str, Any], found: Mapping[int, Tensor], begin: int, fault: str) -> dict[str, Any]:
        """What the patch's sink puts into the store. It drops a sample whose objects cannot all be put."""
        assert isinstance(self.arguments, Patched) and self.put is not None
        store, sample, generation = str(spec["store_id"]), str(spec["sample_id"]), int(spec.get("gen", 1))
        states = {"aux": self._aux(found)[begin:], "last_hidden": found[FINAL][begin:]}
        features = {}
        try:
            for artifact, name in (spec.get("features") or {}).items():
                state_1TW = states[artifact][None].contiguous()
                if fault != "lost":
                    self.put(f"{store}/{sample}/g{generation}/{name}", state_1TW)
                features[name] = {"shape": list(state_1TW.shape), "dtype": DTYPES[state_1TW.dtype]}
        except RuntimeError as error:
            return {"sample_id": sample, "error": str(error)}
        ids = self.arguments.spec_capture_aux_layer_ids
        return {"sample_id": sample, "store_id": store, "gen": generation, "aux_layer_ids": ids or None, "features": features}


class SglangHandler(Handler):
    """One connection."""

    def do_GET(self) -> None:
        self.answer(*self.standin.get(self.path))


def _common(a: list[int], b: list[int]) -> int:
    """Tokens of the common beginning."""
    same = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        same += 1
    return same


def _listed(state_TW: Tensor) -> list[Any]:
    """Lists of numbers; null where a value is not finite."""
    return [[value if value == value else None for value in row] for row in state_TW.tolist()]


def main() -> None:
    target, port, arguments, *faults = sys.argv[1:]
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    wanted = {int(number): fault for number, fault in json.loads(faults[0] if faults else "{}").items()}
    standin = StandIn(states_of(model), Arguments(**json.loads(arguments)), wanted)
    with serving(standin, int(port), kind=SglangHandler) as url:
        print("ready", url.rpartition(":")[2], flush=True)
        threading.Event().wait()


def states_of(model: Any) -> Compute:
    """What SGLang computes, by transformers' hooks."""
    decoder, lock = model.get_decoder(), threading.Lock()

    def compute(ids: list[int]) -> Mapping[int, Tensor]:
        found: dict[int, Tensor] = {}

        def kept(i: int) -> Any:
            def hook(module: Any, given: Any, out: Any) -> None:
                found[i] = (out[0] if isinstance(out, tuple) else out)[0]

            return hook

        with lock, torch.no_grad():  # hooks are of one request
            hooks = [block.register_forward_hook(kept(i)) for i, block in enumerate(decoder.layers)]
            try:
                found[FINAL] = decoder(torch.tensor([ids]), use_cache=False).last_hidden_state[0]
            finally:
                for one in hooks:
                    one.remove()
        return found

    return compute


if __name__ == "__main__":
    main()
