"""HTML, terminal escapes, archives and links: in prompts, data and names."""

from __future__ import annotations

import gzip
import json
import random
import tarfile
import zipfile
from pathlib import Path

from tests.faults.attack import INSPECT, MARKER, MEASURE, OURS, PROMPTS, TARGET, Line, command, judged, run
from tests.faults.campaign import FAILURE, TryResult, failed
from tests.faults.material import MEASURING, TRAINING

SEEN = "MARKTHIS"  # a word in hostile HTML, by which it is found again
PAYLOADS = (
    f"<script>alert('{SEEN}')</script>",
    f"<img src=x onerror={SEEN}()>",
    f"</script><script>{SEEN}()</script>",
    f"<!--<script>{SEEN}",
    f'"><svg onload={SEEN}()>',
    f"{{{{ 7*7 }}}}<b>{SEEN}</b>",
    f"javascript:{SEEN}",
    f"<iframe srcdoc='<script>{SEEN}()</script>'>",
    f"]]><style>{SEEN}</style>",
    f"&lt;script&gt;{SEEN}",
    f'<a href="javascript:{SEEN}">x</a>',
    f"[x](javascript:{SEEN})",
)
RAW = (  # of a page where a payload is markup
    f"<script>alert('{SEEN}",
    f"<img src=x onerror={SEEN}",
    f"<script>{SEEN}",
    f"<svg onload={SEEN}",
    f"<b>{SEEN}",
    f"<style>{SEEN}",
    "<iframe srcdoc",
    f'href="javascript:{SEEN}',
    f"<!--<script>{SEEN}",
)
ESCAPES = (
    "\x1b[2J\x1b[H",
    "\x1b]0;title\x07",
    "\x1b]8;;http://evil\x1b\\x\x1b]8;;\x1b\\",
    "\x1b[31mred",
    "\x9b2J",
    "\x1bc",
    "\x07\x07",
    "a\x08\x08b",
    "\u202egnp.exe",
    "\u2066\u2069",
    "\x1b]52;c;AAAA\x07",
    "\x1b[6n",
)


def hostile_archive(draw: random.Random, folder: Path) -> TryResult:
    """Archives with members outside their folder, a bomb, links in a data folder."""
    how = draw.randrange(6)
    path = "data"
    if how == 0:
        path = "own.zip"
        with zipfile.ZipFile(folder / path, "w") as archive:
            archive.writestr(f"../{MARKER}", "x")
    elif how == 1:
        path = draw.choice(["own.tar", "own.tar.gz", "own.jsonl.gz"])
        with tarfile.open(folder / path, "w:gz" if path.endswith("gz") else "w") as tar:
            tar.add(folder / "data.jsonl", f"../{MARKER}")
    elif how == 2:
        path = draw.choice(["bomb.jsonl.gz", "bomb.json.gz"])
        with gzip.open(folder / path, "wb", compresslevel=1) as file:
            for _ in range(draw.choice([4, 64])):
                file.write(b"[" * (1 << 22) if draw.random() < 0.5 else b" " * (1 << 22))
    elif how == 3:
        (folder / "own").mkdir()
        path = "own"
        (folder / "own" / "train.jsonl").symlink_to(draw.choice(["/etc/passwd", "/nowhere", "../data.jsonl", "train.jsonl"]))
    elif how == 4:
        path = "own.jsonl"
        (folder / path).symlink_to(draw.choice(["/etc/passwd", "own.jsonl", ".", "/proc/self/mem"]))
    else:
        name = draw.choice(["config.json", "tokenizer.json", "model.safetensors.index.json"])
        (folder / "target" / name).unlink()
        (folder / "target" / name).symlink_to(draw.choice(["/etc/passwd", name, "/nowhere", "."]))
        path = "data.jsonl"
    asked = (*INSPECT, f"data.path={path}") if how != 5 else command(draw)
    ended = run(asked, folder)
    return judged(f"archives and links, {asked[0]}", f"{how}; {' '.join(asked)}", ended, folder)


def hostile_page(draw: random.Random, folder: Path) -> TryResult:
    """HTML in prompts, their ids and categories, data, and names: no page contains it unescaped."""
    lines = [
        {"question_id": draw.choice(PAYLOADS), "category": draw.choice(PAYLOADS), "turns": [f"say {draw.choice(PAYLOADS)}"]}
        for _ in range(3)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    records = [
        {
            "messages": [
                {"role": "user", "content": draw.choice(PAYLOADS)},
                {"role": "assistant", "content": draw.choice(PAYLOADS)},
            ]
        }
        for _ in range(9)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    name = draw.choice(["measure", "inspect", "fit"])
    own = draw.choice(["result", f"<script>{SEEN}()<", f'a"onload={SEEN}()', f"x'{SEEN}"])
    fit = ("fit", *TARGET, "data.path=data.jsonl", *TRAINING, "data.held_out=2", "recipe=medusa", "train.steps=1")
    asked = {
        "measure": (*MEASURE, OURS, f"output={own}"),
        "inspect": (*INSPECT, "data.path=data.jsonl", PROMPTS, "data.max_length=512"),
        "fit": (*fit, PROMPTS, *MEASURING, "data.max_length=512", f"output={own}"),
    }[name]
    ended, what, shown = run(asked, folder), f"HTML, {name}", " ".join(asked)
    outcome = judged(what, shown, ended, folder)
    if outcome.result != FAILURE and ended.code:
        return failed(what, "a page", f"exit code {ended.code}: {ended.line}", shown, ended)
    for page in folder.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        if bad := unescaped(text):
            return failed(what, "every payload is escaped", f"{page.name}: {bad}", shown, ended)
    return outcome


def unescaped(text: str) -> str | None:
    """The first place of a page where a payload is markup."""
    for raw in RAW:
        if (at := text.find(raw)) >= 0:
            return text[max(0, at - 60) : at + 80]
    return None


def hostile_escapes(draw: random.Random, folder: Path) -> TryResult:
    """Terminal escapes in prompts, data, and names of all kinds: the console shows none of them raw."""
    escape = draw.choice(ESCAPES)
    lines = [{"question_id": f"a{escape}", "category": f"b{escape}", "turns": [f"say {escape}"]} for _ in range(2)]
    records = [
        {"messages": [{"role": "user", "content": f"x{escape}"}, {"role": "assistant", "content": f"y{escape}"}]}
        for _ in range(9)
    ]
    asked: Line = command(draw)
    how = draw.randrange(12)
    if how == 0:
        records[1]["messages"][0]["role"] = escape
        asked = (*INSPECT, "data.path=data.jsonl")
    elif how == 1:
        lines[1] = {f"tur{escape}ns": ["x"]}
        records[1] = {f"mess{escape}ages": []}
    elif how == 2:
        asked = (*INSPECT, f"data.path=no{escape}thing.jsonl")
    elif how == 3:
        asked = (*MEASURE, f"checkpoint=no{escape}thing")
    elif how == 4:
        asked = (f"meas{escape}ure",) if draw.random() < 0.5 else ("fit", f"reci{escape}pe=x")
    elif how == 5:
        (folder / "target" / "chat_template.jinja").write_text("{{ raise_exception(messages[0].content) }}")
    elif how == 6:
        (folder / "target" / "chat_template.jinja").write_text(f"{{{{ 1/0 }}}}{escape}")
    elif how == 7:
        config = json.loads((folder / "target" / "config.json").read_text())
        config[draw.choice(["model_type", "architectures", "hidden_act", "torch_dtype", "rope_scaling"])] = f"x{escape}"
        (folder / "target" / "config.json").write_text(json.dumps(config))
    elif how == 8:
        file = folder / "medusa" / "step-00006" / "drafter.json"
        made = json.loads(file.read_text())
        made.pop("checksum", None)
        made[draw.choice(["family", "options", "step", "target"])] = f"x{escape}"
        file.write_text(json.dumps(made))
        asked = (*MEASURE, OURS)
    elif how == 9:
        name = f"t{escape}".replace("/", "")  # a name holds no slash
        (folder / name).symlink_to("target")
        asked = tuple(word.replace("target.path=target", f"target.path={name}") for word in asked)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    ended = run(asked, folder)
    what = f"terminal escapes, {asked[0] if asked[0].isalpha() else 'names'}"
    return judged(what, f"{how}, {escape!r}; {' '.join(asked)!r}", ended, folder)
