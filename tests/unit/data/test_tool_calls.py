"""Calls are read from replies in the format that the chat template writes, whichever it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from drafttrain.data import PrepareOptions, generation_jobs
from drafttrain.data.forms import Conversation
from drafttrain.data.forms import conversation as parsed
from drafttrain.data.generation_jobs import Dialogue, GenerationJob, LocalGenerator, documents_of, jobs_of, read_scripts
from drafttrain.data.reply_text import Reply
from drafttrain.data.tool_calls import (
    MISSING,
    NO_CALL,
    NO_RESULTS,
    OTHER,
    UNREADABLE,
    CallReader,
    fitted,
    parsed_calls,
)
from drafttrain.decoding.request import Chunk, Request, Result
from tests.unit.data.templates import RECIPIENT, STYLES, TOOL_STYLES
from tests.unit.data.test_templates import tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get.weather",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}, "days": {"type": "integer"}, "hourly": {"type": "boolean"}},
            },
        },
    }
]
ASKED = [{"role": "user", "content": "And in Rome?"}]


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


CALLS: dict[str, tuple[dict[str, Any], ...]] = {
    "one": (call("get.weather", place="Rome"),),
    "typed": (call("get.weather", place="7", days=7, hourly=True),),
    "none": (call("now"),),
    "marks": (call("get.weather", place='a}]}\n "b" </tool>, {"name": "x"}]'),),
    "two": (call("get.weather", place="Rome"), call("get.weather", place="Oslo", days=2)),
}


def with_calls(name: str) -> PreTrainedTokenizerFast:
    own = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer("chatml").backend_tokenizer, eos_token="<|im_end|>", bos_token="<s>"
    )
    own.chat_template = TOOL_STYLES[name]
    return own


def written(own: PreTrainedTokenizerFast, calls: Any, content: str = "") -> str:
    """The reply as the template writes it, without its end token."""
    reply = {
        "role": "assistant",
        "content": content,
        "tool_calls": [call | {"id": f"abcdefg{i:02}"} for i, call in enumerate(calls)],
    }
    before = own.apply_chat_template(ASKED, tools=TOOLS, tokenize=False, add_generation_prompt=True)
    text = own.apply_chat_template([*ASKED, reply], tools=TOOLS, tokenize=False).removeprefix(before)
    return text.strip().removesuffix(own.eos_token)


def test_call_reader_reads_what_the_template_writes(subtests: pytest.Subtests) -> None:
    """Values whose text has the format's own marks, numbers, no arguments, two calls."""
    for name in TOOL_STYLES:
        own = with_calls(name)
        reader = CallReader.of(own)
        assert reader is not None
        for kind, calls in CALLS.items():
            if kind == "two" and name == "llama":
                continue  # the template takes one
            with subtests.test(name=name, kind=kind):
                for blanks in ("", "\n\n"):
                    text = blanks + written(own, calls) + blanks
                    assert reader.read(text, "", TOOLS) == {"content": "", "tool_calls": list(calls)}
        with subtests.test(name=name, kind="content"):
            text = written(own, CALLS["one"], "Let me see.")
            content = "Let me see." if "Let me see." in text else ""
            assert reader.read(text, "", TOOLS) == {"content": content, "tool_calls": list(CALLS["one"])}


BROKEN = ('"Rome"', '"Ro', "}", "</parameter>", "</arg_value>", "</tool_call>")


def test_call_reader_marks_damaged_calls_as_unreadable(subtests: pytest.Subtests) -> None:
    for name in TOOL_STYLES:
        own = with_calls(name)
        reader = CallReader.of(own)
        assert reader is not None and reader.read("A plain reply." + "\n" * 3000, "", TOOLS) == {}
        text = written(own, CALLS["one"])
        damaged = {text.replace(part, "", 1) for part in BROKEN} - {text} | {text[: 2 * len(text) // 3], text + " and more"}
        for wrong in damaged:
            with subtests.test(name=name, wrong=wrong):
                assert reader.read(wrong, "", TOOLS)["tool_calls"] is None


def test_call_reader_takes_calls_in_thoughts_for_text() -> None:
    own = with_calls(next(iter(TOOL_STYLES)))
    reader, call = CallReader.of(own), written(own, CALLS["one"])
    assert reader is not None
    thought = f"<think>\nmaybe {call}\n</think>\n\nHello"
    assert reader.read(thought, "", TOOLS) == {}


def test_call_reader_of_template_without_calls_is_none() -> None:
    own = with_calls("hermes")
    for template in (STYLES["chatml"].template, STYLES["llama2"].template, RECIPIENT, None):
        own.chat_template = template
        assert CallReader.of(own) is None


def test_call_reader_of_response_template_reads_reasoning_too() -> None:
    own = with_calls("hermes")
    calls = {
        "open": "<c>",
        "close": "</c>",
        "repeats": True,
        "content": "json",
        "transform": {"type": "function", "function": "{content}"},
    }
    own.response_template = {
        "start_anchor": "assistant\n",
        "fields": {"thinking": {"open": "<t>", "close": "</t>"}, "tool_calls": calls, "content": {}},
    }
    reader, prompt = CallReader.of(own), "user\nhi\nassistant\n<t>"
    assert reader is not None and reader.read("so</t>A reply.", prompt, TOOLS) == {}
    read = reader.read('so</t><c>{"name": "get.weather", "arguments": {"place": "Rome"}}</c>', prompt, TOOLS)
    assert read == {"content": "", "tool_calls": list(CALLS["one"]), "reasoning_content": "so"}
    assert reader.read('so</t><c>{"name": "get.weather", </c>', prompt, TOOLS)["tool_calls"] is None


def test_parsed_calls_takes_arguments_as_json_and_refuses_others() -> None:
    served = call("f") | {"id": "x", "index": 0, "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert parsed_calls([served]) == (call("f", a=1) | {"id": "x"},)
    for wrong in ("{", "[1]", 5, "\ud800"):
        assert parsed_calls([call("f") | {"function": {"name": "f", "arguments": wrong}}]) is None
    assert parsed_calls([{"id": "x"}]) is None and parsed_calls([call("f", a="\ud800")]) is None


def named(*names: str) -> list[dict[str, Any]]:
    """Calls of f, g, ... whose ids follow a colon."""
    pairs = [name.split(":") for name in names]
    return [call(name) | ({"id": rest[0]} if rest else {}) for name, *rest in pairs]


def results(*ids: str | None) -> list[dict[str, Any]]:
    return [{"role": "tool", "content": str(i)} | ({"tool_call_id": name} if name else {}) for i, name in enumerate(ids)]


def test_fitted_results_answer_calls_by_position_and_id() -> None:
    def ids(*sides: Any) -> tuple[list[Any], list[Any]]:
        found = fitted(*sides)
        assert not isinstance(found, str)
        return [call.get("id") for call in found[0]], [result.get("tool_call_id") for result in found[1]]

    written = named("f:w1", "g:w2")
    assert ids(written, named("f:a", "g:b"), results("a", "b")) == (["a", "b"], ["a", "b"])
    assert ids(written, named("f:a", "g:b"), results("b", "a")) == (["a", "b"], ["b", "a"])  # answered in another order
    assert ids(written, named("f", "g"), results("x", "y")) == (["x", "y"], ["x", "y"])
    assert ids(written, named("f:a", "g:b"), results(None, None)) == (["w1", "w2"], ["w1", "w2"])
    assert ids(named("f", "g"), named("f", "g"), results(None, None)) == ([None, None], [None, None])
    assert ids([], [], []) == ([], [])


def test_fitted_says_why_results_do_not_fit() -> None:
    assert fitted(named("f"), named("g"), results(None)) == OTHER
    assert fitted(named("f"), named("f", "f"), results(None, None)) == OTHER
    assert fitted(named("f", "f"), named("f"), results(None)) == OTHER
    assert fitted([], named("f"), results(None)) == MISSING
    assert fitted(named("f"), [], []) == NO_RESULTS
    assert fitted([], [], results(None)) == NO_CALL == fitted(named("f"), named("f"), results(None, None))


def record(*steps: Any, origin: str = "x:1") -> Conversation:
    """user turns as text, the assistant's calls as lists, its replies and results as messages."""
    messages = [
        {"role": "user", "content": step}
        if isinstance(step, str)
        else {"role": "assistant", "content": "", "tool_calls": step}
        if isinstance(step, list)
        else step
        for step in steps
    ]
    return Conversation(origin, tuple(messages), tools=tuple(TOOLS))


OLD = {"role": "assistant", "content": "old"}


def test_read_scripts_keep_calls_that_results_follow() -> None:
    (found,) = read_scripts([record("a", named("f:1"), *results("1"), OLD, "b", named("g"), OLD)]).scripts
    assert [message["role"] for message in found.messages] == ["user", "assistant", "tool", "user"]
    assert found.messages[1]["tool_calls"] == named("f:1") and found.tools == tuple(TOOLS)
    split = read_scripts([record("a", named("f:1"), named("g:2"), *results("1", "2"))]).scripts[0]
    assert split.messages[1]["tool_calls"] == named("f:1", "g:2")
    same = record("a", named("f:1"), *results("1"))
    assert read_scripts([same, same, record("a", named("g:1"), *results("1"))]).skipped == {"duplicate": 1}
    kept = read_scripts([same, record("a", OLD)], calls=False)
    assert kept.skipped == {"with tools": 1} and len(kept.scripts) == 1


def run(conversation: Conversation, *replies: Reply) -> tuple[list[list[str]], Dialogue]:
    """(the roles of each prompt that is asked, the dialogue), where the target replies so."""
    (script,) = read_scripts([conversation]).scripts
    dialogue, prompts, left = Dialogue(GenerationJob(script, 0, 0.0, 0)), list[list[str]](), iter(replies)
    while (prompt := dialogue.next_prompt()) is not None:
        prompts.append([message["role"][0] for message in prompt])
        dialogue.add_reply(next(left), 1)
    assert next(left, None) is None
    return prompts, dialogue


def calling(*names: str) -> Reply:
    return Reply("", "stop", tuple(named(*names)))


SAID = Reply("new", "stop")
AGENT = record("a", named("f:1"), *results("1"), named("g:2", "g:3"), *results("2", "3"), OLD, "b", named("h"))


def test_dialogue_puts_recorded_results_after_the_targets_calls() -> None:
    prompts, dialogue = run(AGENT, calling("f:w"), calling("g", "g"), SAID, calling("i"))
    assert ["".join(prompt) for prompt in prompts] == ["u", "uat", "uatatt", "uatattau"]
    assert dialogue.ended is None  # the record has nothing after the last reply, whatever it is
    found = dialogue.record()
    assert [[c.get("id") for c in m["tool_calls"]] for m in found["messages"] if "tool_calls" in m] == [
        ["1"],
        ["2", "3"],
        [None],
    ]
    assert found["tools"] == TOOLS and found["finish"] == ["stop"] * 4


def test_dialogue_ends_after_calls_that_do_not_fit() -> None:
    for replies, reason, roles in (
        ((calling("g"),), OTHER, "ua"),
        ((SAID,), MISSING, "ua"),
        ((calling("f"), calling("g")), OTHER, "uata"),
        ((calling("f"), calling("g", "g"), calling("f")), NO_RESULTS, "uatatta"),
        ((calling("f"), Reply("", "stop", None)), UNREADABLE, "ua"),
    ):
        found = run(AGENT, *replies)[1].record()
        assert ("".join(message["role"][0] for message in found["messages"]), found["ended"]) == (roles, reason)
    found = run(AGENT, Reply("", "stop", None))[1].record()
    assert found["ended"] == UNREADABLE and "messages" not in found
    assert run(record("a", OLD, *results("1")), SAID)[1].ended == NO_CALL


class ScriptedSession:
    """Replies to a prompt with the text that `replies` has for its last words."""

    replies: dict[str, str] = {}  # noqa: RUF012
    own: PreTrainedTokenizerFast

    def __init__(self, decoder: Any, slots: int, length: int) -> None:
        self.decoder, self.queue = SimpleNamespace(request=lambda tokens, seed: Request(tokens)), list[Chunk]()

    def submit(self, request: Request) -> tuple[Result]:
        text = self.own.decode(request.prompt)
        reply = next(reply for end, reply in self.replies.items() if text.endswith(f"{end}<|im_end|>\n<|im_start|>assistant\n"))
        result = Result(0, len(request.prompt), self.own(reply + self.own.eos_token)["input_ids"], ended_by="stop")
        self.queue.append(Chunk(result, result.tokens, 0))
        return (result,)

    def step(self) -> list[Chunk]:
        chunks, self.queue = self.queue, []
        return chunks


@pytest.mark.parametrize("name", ["hermes", "mistral"])
def test_local_generator_reads_calls_and_continues_with_results(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens are those that were written; the template writes calls again in its own way."""
    own = with_calls(name)
    text = written(own, CALLS["two"])
    conversation = record(
        "And in Rome?",
        [c | {"id": f"given{i:04}"} for i, c in enumerate(CALLS["two"])],
        *results("given0000", "given0001"),
        OLD,
    )
    monkeypatch.setattr(generation_jobs, "Session", ScriptedSession)
    monkeypatch.setattr(ScriptedSession, "own", own, raising=False)
    monkeypatch.setattr(ScriptedSession, "replies", {"And in Rome?": text, "1": "Warm in both."})
    generator = LocalGenerator(lambda _, t: SimpleNamespace(scratch=0), own, 10_000, 2)  # type: ignore[arg-type, return-value]
    done = list[Dialogue]()
    generator.answer(list(jobs_of(read_scripts([conversation]).scripts, PrepareOptions())), done.append, lambda tokens: None)
    (found,) = (dialogue.record() for dialogue in done)
    asked, answer, *_, last = found["messages"]
    assert (asked["role"], answer["content"], last["content"]) == ("user", "", "Warm in both.")
    assert answer["tool_calls"] == [c | {"id": f"given{i:04}"} for i, c in enumerate(CALLS["two"])] and "ended" not in found
    documents = documents_of(found["turns"])
    supervised = [own.decode([i for i, m in zip(d["input_ids"], d["loss_mask"], strict=True) if m]) for d in documents]
    assert "".join(supervised) == f"{text}<|im_end|>Warm in both.<|im_end|>"
    read = parsed("x:1", {key: found[key] for key in ("messages", "tools")})
    assert read.tools == tuple(TOOLS) and read.messages[1] == answer
