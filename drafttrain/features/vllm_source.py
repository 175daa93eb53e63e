"""vLLM's `extract_hidden_states`: the answer says where the states and the token ids are, and a transport reads them.

vLLM numbers layers by what is before them: id i is the residual stream before block i, so 0 is the embedding and b + 1 the
output of block b. It gives the last block's output, and no state after the last norm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from drafttrain.core.errors import UserError
from drafttrain.features.answers import AnswerError, AnswerRequest
from drafttrain.features.source import Ask, Description, Received, StatesRequest
from drafttrain.features.transport import NoStatesError, Transport, WrongError
from drafttrain.model.target import FINAL


class VllmSource:
    """States that vLLM's connectors leave for a transport."""

    def __init__(self, keys: Sequence[int], longest: int, transport: Transport, way_out: str) -> None:
        """longest: tokens of the longest conversation. way_out: how to start a server that gives the states, for messages."""
        self.keys, self.longest, self.transport, self.way_out = tuple(keys), longest, transport, way_out
        self.names = transport.names

    def label(self, key: int) -> str:
        """A state's name in vLLM's numbering."""
        return "the state after the last norm" if key == FINAL else f"the state of layer id {key + 1}"

    def describe(self, url: str, ask: Ask) -> Description:
        """Ask for the model's name, its room and the version."""
        try:
            model_info = ask("GET", "models")["data"][0]
            model = str(model_info["id"])
            context, owner = int(model_info.get("max_model_len") or 2**31), str(model_info.get("owned_by") or "server")
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise UserError(f"{url} does not list its models; is it an OpenAI-compatible server?") from error
        if context <= self.longest:
            raise UserError(
                f"{url} takes {context} tokens, one of them its answer, but conversations have up to {self.longest}; start it "
                f"with --max-model-len {self.longest + 1}, or lower data.max_length"
            )
        try:
            version = str(ask("GET", f"{url.removesuffix('/v1')}/version")["version"])
        except (UserError, KeyError, TypeError):
            version = "of unknown version"
        return Description(owner, version, model)

    def states(self, url: str, description: Description, ask: Ask, request: StatesRequest) -> Received:
        """Ask for one token after the sequence, or for an answer, and read what vLLM's answer names."""
        answer = request.answer
        sampling = {"max_tokens": 1, "temperature": 0} if answer is None else answer.fields()
        body = {"model": description.details, "prompt": list(request.ids), "request_id": request.name}
        response = ask("POST", "completions", body | sampling)
        params = response.get("kv_transfer_params") if isinstance(response, dict) else None
        answer_ids = [] if answer is None else _written(url, answer, response)
        tokens = len([*request.ids, *answer_ids[:-1]])
        try:
            states = self.transport.receive(request.name, params, tokens, request.deadline, request.closed)
        except NoStatesError as error:
            raise UserError(f"{url} {error}; {self.way_out}") from error
        return Received(states.hidden_TLH, states.token_T.tolist(), answer_ids)

    def remove(self, names: Iterable[str]) -> None:
        """As `Transport.remove`."""
        self.transport.remove(names)

    def sweep(self, late: bool = False) -> None:
        """As `Transport.sweep`."""
        self.transport.sweep(late)

    def close(self) -> None:
        """As `Transport.close`."""
        self.transport.close()


def _written(url: str, request: AnswerRequest, response: Any) -> list[int]:
    """The token ids of the target's answer."""
    try:
        return request.read(response)
    except AnswerError as error:
        raise WrongError(str(error)) from error
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise UserError(f"{url} answers without token ids; features.answers needs vLLM 0.32 or later") from error
