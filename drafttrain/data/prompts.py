"""Evaluation prompts from files in MT-bench's record form, from files of public sets, or from the hub; and prompts of a given
length, cut from long documents.

`SETS` says where each public set is published, and how its records become prompts. A new set is one entry. The wording follows
Spec-Bench (arXiv 2401.07851): GSM8K's questions unchanged, articles after "Summarize: ". Of large sets the first 80 prompts are
used, as many as Spec-Bench has of each task.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from drafttrain.core.errors import UserError, data_set_reason, printable, without_token
from drafttrain.data import DataOptions
from drafttrain.data.files import ASSETS, keys_of, path_of
from drafttrain.data.forms import TOOLS, adapter_of, conversation, tools_of
from drafttrain.data.pictures import Content, sources_of, text_of
from drafttrain.data.records import read_records
from drafttrain.data.sources import cache_folder
from drafttrain.data.templates import template_errors, template_origin
from drafttrain.targets.images import TEXT_ONLY, Images

Record = dict[str, Any]
FEW = 80  # prompts used of a large set, if no limit is given
SINGLE = ("prompt", "question")  # HumanEval, GSM8K
DOCUMENTS = 16
ENDINGS = (".txt", ".md", ".rst", ".py", ".html", ".tex")
Document = tuple[str, str]  # name and text


@dataclass(frozen=True, slots=True)
class PromptSet:
    """A public prompt set."""

    turns: Callable[[Record], Any]  # a record's user turns; None if the record is not of this set
    hub: str | None  # data set id on the hub; None: not on the hub
    split: str = "test"  # as `datasets.load_dataset` takes it
    config: str | None = None  # as `datasets.load_dataset` takes it
    address: str | None = None  # URL of the file, for a set that is not on the hub
    name: str | None = None  # field with the record's id
    category: str | None = None  # field with the record's category; None: the set's own name
    reference: str | None = None  # field with the record's answer
    most: int | None = None  # prompts used if no limit is given
    tools: Callable[[Record], Any] | None = None  # a record's tools, where other fields than `tools` have them
    masked: str | None = None  # what stands in turns whose text its publisher may not give: such records are left out


def field_of(key: str) -> Callable[[Record], Any]:
    """A function that returns a field as the only user turn."""
    return lambda record: [record[key]] if isinstance(record.get(key), str) else None


def _turns(record: Record) -> Any:
    """The turns of MT-bench: `turns` in FastChat's file, `prompt` on the hub; and Arena-Hard's, each with its `content`."""
    turns = record.get("turns", record.get("prompt"))
    return (
        [turn.get("content", turn) if isinstance(turn, Mapping) else turn for turn in turns]
        if isinstance(turns, list)
        else turns
    )


def _instruction(record: Record) -> Any:
    """An instruction, and its input below it."""
    text, context = record.get("instruction"), record.get("input")
    return None if text is None else [f"{text}\n\n{context}" if context else text]


def _with_tests(record: Record) -> Any:
    """A task with its tests, in the words of MBPP's paper (arXiv 2108.07732, section 4)."""
    text, tests = record.get("text"), record.get("test_list")
    return None if text is None or tests is None else [f"{text}\nYour code should pass these tests:\n\n" + "\n".join(tests)]


def _with_starter(record: Record) -> Any:
    text, starter = record.get("question_content"), record.get("starter_code")
    return None if text is None else [f"{text}\n\nBegin with this code:\n\n{starter}" if starter else text]


def _summary(record: Record) -> Any:
    return None if record.get("article") is None else [f"Summarize: {record['article']}"]


def _bfcl_turns(record: Record) -> Any:
    """The user's turns of BFCL, each a list of messages. Records without functions are of agents in its own programs."""
    question = record.get("question")
    if record.get("function") is None or not isinstance(question, list):
        return None
    turns = [
        [m for m in turn if isinstance(m, dict) and m.get("role") == "user"] for turn in question if isinstance(turn, list)
    ]
    texts = [[m["content"] for m in turn if isinstance(m.get("content"), str)] for turn in turns]
    return ["\n\n".join(turn) for turn in texts] if texts and all(texts) else None


JSON_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}  # of the Python types of BFCL's schemas


def _bfcl_tools(record: Record) -> Any:
    """BFCL's functions with JSON's names of types."""

    def typed(schema: Any) -> Any:
        if isinstance(schema, list):
            return [typed(value) for value in schema]
        if not isinstance(schema, dict):
            return schema
        return {k: JSON_TYPES.get(v, v) if k == "type" and isinstance(v, str) else typed(v) for k, v in schema.items()}

    return typed(record["function"])


SPEED_MASK = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
LENGTHS = ("1k", "2k", "8k", "16k", "32k")  # of SPEED-Bench's long prompts, in tokens
SPEED_CONFIGS = {"speed_bench": "qualitative"} | {f"speed_bench_{length}": f"throughput_{length}" for length in LENGTHS}
SETS: dict[str, PromptSet] = {
    "spec_bench": PromptSet(
        _turns,
        None,
        address="https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl",
        name="question_id",
        category="category",
        reference="reference",
    ),
    "mt_bench": PromptSet(
        _turns, "HuggingFaceH4/mt_bench_prompts", "train", name="question_id", category="category", reference="reference"
    ),
    "humaneval": PromptSet(field_of("prompt"), "openai/openai_humaneval", name="task_id", reference="canonical_solution"),
    "gsm8k": PromptSet(field_of("question"), "openai/gsm8k", config="main", reference="answer"),
    "math500": PromptSet(
        field_of("problem"), "HuggingFaceH4/MATH-500", name="unique_id", category="subject", reference="solution"
    ),
    "aime25": PromptSet(field_of("problem"), "math-ai/aime25", name="id", reference="answer"),
    "mbpp": PromptSet(_with_tests, "google-research-datasets/mbpp", config="full", name="task_id", reference="code"),
    "livecodebench": PromptSet(
        _with_starter, "lighteval/code_generation_lite", config="v6", name="question_id", category="difficulty"
    ),
    "bfcl": PromptSet(
        _bfcl_turns,
        None,
        address="https://raw.githubusercontent.com/ShishirPatil/gorilla/main/berkeley-function-call-leaderboard/bfcl_eval/data/"
        "BFCL_v4_multiple.json",
        name="id",
        tools=_bfcl_tools,
    ),
    "arena_hard": PromptSet(_turns, "lmarena-ai/arena-hard-auto-v0.1", "train", name="question_id"),
    **{
        name: PromptSet(_turns, "nvidia/SPEED-Bench", config=config, name="question_id", category="category", masked=SPEED_MASK)
        for name, config in SPEED_CONFIGS.items()
    },
    "alpaca": PromptSet(_instruction, "tatsu-lab/alpaca", "train", reference="output", most=FEW),
    "cnn_dm": PromptSet(_summary, "abisee/cnn_dailymail", config="3.0.0", name="id", reference="highlights", most=FEW),
}


def hub_records(name: str, limit: int | None) -> Iterator[tuple[str, Record]]:
    """(origin, record) pairs of a set, from the hub or its cache. Raises UserError if the set is not available."""
    from datasets import load_dataset  # slow to import
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HTTPError

    source = SETS[name]
    if source.hub is None:
        raise UserError(
            f"prompt set {name} is not on the hub: download {source.address}, and give the file as measure.prompts={name}:FILE"
        )
    limit = limit or source.most
    try:
        # a limited read streams, so that a few records of a large set do not download it
        rows = load_dataset(source.hub, name=source.config, split=source.split, streaming=limit is not None)
        pairs = ((f"{source.hub}:record {number}", dict(row)) for number, row in enumerate(rows, start=1))
        records = list(islice(_unmasked(name, pairs), limit))
    except (HTTPError, OSError, ValueError, DatasetsError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        reason = data_set_reason(error, source.hub) or without_token(first_line)
        raise UserError(
            f"prompt set {name}: {source.hub} cannot be loaded ({reason}); download it, and give the file as "
            f"measure.prompts={name}:FILE"
        ) from error
    return iter(records)


def _unmasked(name: str, records: Iterable[tuple[str, Record]]) -> Iterator[tuple[str, Record]]:
    """The (origin, record) pairs whose text is there; a note on stderr says how many are left out."""
    mask = SETS[name].masked if name in SETS else None
    left_out = 0
    try:
        for origin, record in records:
            if mask and mask in str(record.get("turns")):
                left_out += 1
            else:
                yield origin, record
    finally:
        if left_out:
            advice = "its publisher's specdec_bench fetches their text from the sources"
            print(f"note: {name}: {left_out} masked prompts are left out; {advice}", file=sys.stderr)


@dataclass(frozen=True, slots=True)
class Prompt:
    """An evaluation prompt."""

    question_id: str | int
    category: str
    turns: list[Content]  # the user's turns; the target's replies are inserted between them
    format: str | None = None  # json if the reply must be JSON
    required: tuple[str, ...] = ()  # keys that the JSON reply must have
    reference: Any = None  # the record's own answer
    origin: str | None = None  # name of its public set, if any
    tools: tuple[Record, ...] = ()  # JSON schemas for the template
    adapter: str | None = None  # LoRA adapter of the target that is asked; None: the target itself


def load_prompts(prompts: str | Sequence[str], limit: int | None = None) -> list[Prompt]:
    """Read `embedded`, a file, a public set by name (`SETS`) or as NAME:FILE, or several of these.

    limit: largest number of prompts of each. Raises UserError that names file and line of a malformed record.
    """
    names: list[Any] = list(prompts) if isinstance(prompts, list | tuple) else [prompts]
    if not names or not all(isinstance(name, str) for name in names):
        raise UserError(f"measure.prompts is {prompts!r}; name embedded, a file, or one or more of {', '.join(SETS)}")
    return [prompt for name in names for prompt in _load(name, limit)]


def named_prompts(prompts: str | Sequence[str]) -> str:
    """The prompts' names for a report."""
    return prompts if isinstance(prompts, str) else ", ".join(prompts)


def _load(name: str, limit: int | None) -> list[Prompt]:
    if name in SETS:
        return [_prompt(origin, record, i, name, name) for i, (origin, record) in enumerate(hub_records(name, limit), start=1)]
    set_name, _, path = name.partition(":")
    if set_name not in SETS:
        set_name, path = "", name
    file = ASSETS / "prompts.jsonl" if path == "embedded" else path_of(path, "prompts")
    read = None if set_name and SETS[set_name].masked else limit  # the limit counts what is left
    records = islice(_unmasked(set_name, read_records(file, read, cache_folder(DataOptions()) / "spool")), limit)
    category = set_name or file.name.split(".")[0]
    numbered = enumerate(records, start=1)
    return [_prompt(origin, record, i, category, set_name, file.parent) for i, (origin, record) in numbered]


def _prompt(origin: str, record: dict[str, Any], index: int, category: str, chosen: str, folder: Path | None = None) -> Prompt:
    """category: used if the record has none. chosen: the record's public set; empty: recognised by its fields.

    folder: that of the file, to which the paths of images are relative.
    """
    spec = SETS.get(chosen)
    turns = spec.turns(record) if spec else _turns_by_field(record)
    turns = turns if spec else _with_images(origin, record, turns, folder)
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) or spec is None for turn in turns):
        record_keys = keys_of(record)
        expected = f"the fields of {chosen}" if spec else "`turns`, a list of strings (or `prompt`, or `question`)"
        raise UserError(f"{origin}: expected {expected}, got {record_keys}; write the prompt so")
    if not text_of(turns[0]).strip():
        raise UserError(f"{origin}: expected text in the first turn, got a blank string; fill it, or remove the record")
    question_id = record.get(spec.name) if spec and spec.name else record.get("question_id", record.get("task_id"))
    question_id = index if question_id is None else question_id
    category = record.get((spec and spec.category) or "category") or category
    reference = record.get(spec.reference) if spec and spec.reference else record.get("reference")
    name = question_id if isinstance(question_id, int) else printable(str(question_id))
    of_set = None if any(key in record for key in ("turns", "messages", "prompt")) else SETS.values()
    with_tools = spec or next((each for each in of_set or () if each.tools and each.turns(record) is not None), None)
    tools = tools_of(origin, {TOOLS: with_tools.tools(record)} if with_tools and with_tools.tools else record)
    details = (*_format(origin, record), reference, chosen or None, tools, adapter_of(origin, record))
    return Prompt(name, printable(str(category)), turns, *details)


def _with_images(origin: str, record: dict[str, Any], turns: Any, folder: Path | None) -> Any:
    """The turns with the files of their images: lists of parts in `turns`, or the user's turns of `messages`."""
    if turns is None and isinstance(record.get("messages"), list):
        parsed = conversation(origin, {"messages": record["messages"]}, "messages", False, folder)
    elif isinstance(turns, list) and any(isinstance(turn, list) for turn in turns):
        parsed = conversation(origin, {"turns": turns}, "turns", False, folder)
    else:
        return turns if isinstance(turns, list) and all(isinstance(turn, str) for turn in turns) else None
    return [message["content"] for message in parsed.messages if message["role"] == "user"]


def _turns_by_field(record: dict[str, Any]) -> Any:
    """The turns of a record of unknown form, recognised by its fields."""
    if record.get("turns") is not None:
        return _turns(record)
    candidates = (field_of(key)(record) for key in SINGLE)
    return next((turns for turns in [*candidates, *(s.turns(record) for s in SETS.values())] if turns is not None), None)


def _format(origin: str, record: dict[str, Any]) -> tuple[str | None, tuple[str, ...]]:
    """The reply's required format and its required keys: `required`, or those of a JSON schema."""
    form, required = record.get("format"), record.get("required")
    if form not in (None, "json"):
        raise UserError(f"{origin}: expected json in `format`, got {form!r}; write json, or leave it out")
    if required is None and isinstance(schema := record.get("schema"), dict):
        required = schema.get("required")
    required = [] if required is None else required
    if not isinstance(required, list) or not all(isinstance(key, str) for key in required) or (required and form is None):
        raise UserError(f'{origin}: expected a list of keys in `required`, with "format": "json", got {required!r}; mend it')
    return form, tuple(required)


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[Content],
    replies: Sequence[str] = (),
    images: Images = TEXT_ONLY,
    tools: Sequence[Record] = (),
) -> list[int]:
    """Token ids that the target continues: the first turn, or with r replies the first r + 1 turns and the replies between.

    A chat template is applied with its generation prompt. Without one, turns are plain text with blank lines between them.
    """
    return encode_messages(tokenizer, dialogue(turns, replies), images, tools=tools)


def dialogue(turns: Sequence[Content], replies: Sequence[str]) -> list[dict[str, Any]]:
    """The first turns with the replies between them, one turn more than replies."""
    contents = [text for pair in zip(turns, replies, strict=False) for text in pair] + [turns[len(replies)]]
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def encode_messages(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    images: Images = TEXT_ONLY,
    reply: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    tools: Sequence[Record] = (),
) -> list[int]:
    """Token ids of a conversation that waits for a reply. Templates are applied as in `encode_prompt`.

    images: of the target, for contents with images. reply: follows the conversation. arguments, tools: for the template.
    """
    sources = sources_of(messages)
    if not tokenizer.chat_template:
        if sources:
            raise UserError(
                f"{sources[0][:80]}: images need a chat template, and the tokenizer has none; choose another target"
            )
        return list(tokenizer("\n\n".join(m["content"] for m in messages) + (reply or ""), verbose=False)["input_ids"])
    full_messages = [*messages] if reply is None else [*messages, {"role": "assistant", "content": reply}]
    text = rendered(tokenizer, full_messages, tools, arguments, prompt=reply is None)
    if not sources:
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    origin = f"the prompt {text_of(messages[0]['content'])[:40]!r}"
    expanded = images.expand(text, sources, origin)
    ids = tokenizer(expanded.text, add_special_tokens=False, verbose=False)["input_ids"]
    return [int(i) for i in images.ids(ids, expanded.images, origin)]


def rendered(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Record] = (),
    arguments: Mapping[str, Any] | None = None,
    prompt: bool = True,
) -> str:
    """The conversation's text by the chat template. prompt: with the generation prompt."""
    refusal = f"the chat template refuses the prompt {text_of(messages[0]['content'])[:40]!r}"
    with template_errors(refusal, template_origin(tokenizer), "use a template that takes user turns"):
        render_options = {"add_generation_prompt": prompt, "tokenize": False} | ({"tools": list(tools)} if tools else {})
        return str(tokenizer.apply_chat_template([dict(m) for m in messages], **{**(arguments or {}), **render_options}))


def read_documents(path: str | None) -> list[Document]:
    """The longest text files of a folder, or one file. None: Python's standard library, which is on every machine.

    Raises UserError where there is none.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if path is None else Path(path).expanduser()
    if root.is_dir():
        paths = root.glob("*.py") if path is None else root.rglob("*")
        files = sorted((f for f in paths if f.is_file() and f.suffix in ENDINGS), key=lambda f: (-f.stat().st_size, f.name))
    else:
        files = [root] if root.is_file() else []
    if not files:
        raise UserError(
            f"measure.documents {path}: expected a text file, or a folder with {', '.join(ENDINGS)} files; found none"
        )
    return [(file.name, file.read_text(encoding="utf-8", errors="replace")) for file in files[:DOCUMENTS]]


def long_prompts(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document], length: int, count: int
) -> list[tuple[str, list[int]]]:
    """(name, token ids) of at most `count` prompts of `length` tokens or slightly fewer.

    Each is the beginning of a document, as a user turn where there is a chat template. Shorter documents are skipped. A single
    document is cut into `count` parts.
    """
    named_texts = list(documents)
    prompts: list[tuple[str, list[int]]] = []
    if len(named_texts) == 1:
        name, text = named_texts[0]
        size = len(text) // count
        named_texts = [(f"{name} {i + 1}", text[i * size : (i + 1) * size]) for i in range(count)]
    for name, text in named_texts:
        if len(prompts) < count and (tokens := _beginning(tokenizer, text, length)) is not None:
            prompts.append((name, tokens))
    return prompts


def _beginning(tokenizer: PreTrainedTokenizerBase, text: str, length: int) -> list[int] | None:
    """The longest beginning whose prompt has at most `length` tokens, within a few tokens; None if the text is too short."""

    def prompt(characters: int) -> list[int]:
        return encode_messages(tokenizer, [{"role": "user", "content": text[:characters]}])

    if len(prompt(min(len(text), 16 * length))) < length:
        return None
    low, high = 0, min(len(text), 16 * length)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if len(prompt(middle)) <= length else (low, middle)
    return prompt(low)
