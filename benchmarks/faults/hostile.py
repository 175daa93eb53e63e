"""Input made to harm: templates, indexes, pickles, archives, HTML, terminal escapes, and code that comes with a model."""

from __future__ import annotations

import gzip
import json
import pickle
import random
import shutil
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.faults import material
from benchmarks.faults.campaign import FAILURE, REFUSED, UNCHANGED, Outcome, broken, failed
from benchmarks.faults.child import Ended, cli, forked
from benchmarks.faults.material import MEASURING, TRAINING

SECONDS, SIZE = 2.0, 256 << 20  # what a template may take here, so that a try is short
MARKER = "marker-of-foreign-code"  # a file that hostile code would make
SEEN = "MARKTHIS"  # a word in hostile HTML, by which it is found again
CONTROLS = "\x1b\x07\x9b\x08"
PAYLOADS = (
    f"<script>alert('{SEEN}')</script>", f"<img src=x onerror={SEEN}()>", f"</script><script>{SEEN}()</script>", f"<!--<script>{SEEN}",
    f"\"><svg onload={SEEN}()>", f"{{{{ 7*7 }}}}<b>{SEEN}</b>", f"javascript:{SEEN}", f"<iframe srcdoc='<script>{SEEN}()</script>'>",
    f"]]><style>{SEEN}</style>", f"&lt;script&gt;{SEEN}", f"<a href=\"javascript:{SEEN}\">x</a>", f"[x](javascript:{SEEN})",
)  # fmt: skip
ESCAPES = (
    "\x1b[2J\x1b[H", "\x1b]0;title\x07", "\x1b]8;;http://evil\x1b\\x\x1b]8;;\x1b\\", "\x1b[31mred", "\x9b2J", "\x1bc", "\x07\x07", "a\x08\x08b",
    "\u202egnp.exe", "\u2066\u2069", "\x1b]52;c;AAAA\x07", "\x1b[6n",
)  # fmt: skip


class Hostile:
    """A try is one hostile input to one command."""

    name = "hostile"

    def __init__(self) -> None:
        self.folder = Path()

    def prepare(self, folder: Path) -> None:
        self.folder = folder / "material"
        if (self.folder / "ready").is_file():
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        material.base(self.folder)
        fit = ("fit", "target=hf", "target.path=target", "data.path=data.jsonl", *TRAINING, "measure.enabled=false", "output=runs")
        material.must([*fit, "recipe=medusa"], self.folder)
        run = material.only_run(self.folder / "runs")
        shutil.copytree(run / "checkpoints" / "step-00006", self.folder / "medusa" / "step-00006")
        shutil.rmtree(self.folder / "runs")
        (self.folder / "ready").touch()

    def attempt(self, draw: random.Random, folder: Path) -> list[Outcome]:
        shutil.copytree(self.folder, folder, dirs_exist_ok=True)
        return [draw.choice(ATTACKS)(draw, folder)]


def run(arguments: list[str], folder: Path) -> Ended:
    """In a child whose templates have less time and memory."""
    work = cli(arguments)

    def bounded() -> int:
        from drafttrain.data import bounds

        bounds.SECONDS, bounds.SIZE = SECONDS, SIZE
        return work()

    return forked(bounded, folder, folder.parent / "said").wait(60)


def judged(what: str, shown: str, ended: Ended, folder: Path, refuse: bool = False) -> Outcome:
    """No foreign code ran; it ends in one line, or as if nothing had been. refuse: it has to be refused."""
    expected = "one line and exit code 2" if refuse else "one line and exit code 2, or no harm"
    fault = broken(ended)
    if made := [path for path in (folder, folder.parent) if (path / MARKER).exists()]:
        fault = f"foreign code has run: {made[0] / MARKER}"
        (made[0] / MARKER).unlink()
    said = ended.err if what.endswith(", generate") else ended.out + ended.err  # its output is the model's text as it is
    if fault is None and (control := next((c for c in CONTROLS if c in said), None)):
        fault = f"the output has {control!r} in it"
    if fault is None and ended.code and ended.line is None:
        fault = f"exit code {ended.code} without one line"
    if fault is None and refuse and ended.code == 0:
        fault = "it is not refused"
    if fault is not None:
        return failed(what, expected, fault, shown, ended)
    return Outcome(what, REFUSED if ended.code else UNCHANGED, command=shown)


TARGET = ["target=hf", "target.path=target"]
PROMPTS = "prompts=prompts.jsonl"


def command(draw: random.Random) -> list[str]:
    """One that reads a target."""
    return draw.choice(
        [
            ["inspect", *TARGET, "data.path=data.jsonl", "out=page.html"],
            ["generate", *TARGET, "prompt=hello", "decode.max_new_tokens=4"],
            ["measure", *TARGET, "checkpoint=medusa/step-00006", PROMPTS, *MEASURING, "output=result"],
            ["prepare", *TARGET, "data.path=prompts.jsonl", "out=own", "prepare.max_new_tokens=4", "prepare.max_length=300"],
        ]
    )


def template(draw: random.Random) -> str:
    """A chat template that never ends, fills memory, fails, or reaches for the interpreter."""
    n = draw.choice([10**3, 10**6, 10**9, 10**12])
    touch = f"touch {MARKER}"
    reach = draw.choice(
        [
            "''.__class__.__mro__[1].__subclasses__()",
            "cycler.__init__.__globals__.os.popen('%s').read()" % touch,
            "lipsum.__globals__['os'].system('%s')" % touch,
            "self.__init__.__globals__['__builtins__']['open']('%s', 'w')" % MARKER,
            "joiner['__init__']['__globals__']['os'].system('%s')" % touch,
            "messages|map(attribute='__class__')|list",
            "(messages|attr('__class__')|attr('__mro__'))[1]",
            "namespace.__init__.__globals__",
            "raise_exception.__globals__['os'].system('%s')" % touch,
            "tojson.__globals__",
            "strftime_now.__globals__['sys'].modules['os'].system('%s')" % touch,
            "'{0.__class__.__init__.__globals__}'.format(messages)",
            "'%s'|format(messages)" % ("%s" * draw.choice([1, 10**4])),
        ]
    )
    body = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return draw.choice(
        [
            "{{ 1 / 0 }}", "{{ 1 // 0 }}", "{{ 5 % 0 }}",
            "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
            "{%% for i in range(%d) %%}{{ i }}{%% endfor %%}" % n,
            "{%% for i in range(99999) %%}{%% for j in range(99999) %%}{%% endfor %%}{%% endfor %%}" % (),
            "{{ 'a' * %d }}" % n, "{{ [0] * %d }}" % n, "{{ 10 ** (10 ** %d) }}" % draw.choice([3, 5, 8]),
            "{%% set n = namespace(s='x') %%}{%% for i in range(%d) %%}{%% set n.s = n.s ~ n.s %%}{%% endfor %%}" % draw.choice([5, 60]),
            "{{ '%%%dd' | format(1) }}" % min(n, 10**9), "{{ 'a'.center(%d) }}" % n, "{{ 'a'.ljust(%d)|length }}" % n, "{{ 'aaaa'|replace('', 'b' * %d) }}" % min(n, 10**8),
            "{{ %s }}" % reach, "{{ %s }}" % reach, "{{ %s }}" % reach, body + "{{ %s }}" % reach,
            "{% include '/etc/passwd' %}", "{% import 'os' as os %}{{ os }}", "{% extends 'x' %}",
            "{{ messages[0].content.nothing.there }}", "{{ raise_exception('\x1b[2J no') }}", "{{ raise_exception('a\nb') }}",
            "{{ messages.clear() }}", "{{ messages.append(messages) }}{{ messages }}", "{% set _ = messages.pop() %}{{ messages }}",
            "{{ lipsum(n=%d) }}" % min(n, 10**7), "{{ range(%d)|list|length }}" % n, "{{ 'a'|indent(%d) }}" % n, "{{ ('a,' * 10**6)|wordwrap(1) }}",
            "{% if %}", "{{", "{% for m in messages %}", "{{ 'a' * 10**9 * 10**9 }}", "", "\x1b[2J" + body, "{{ ((" + "(" * 3000 + "1" + ")" * 3002 + " }}",
            "{{ '" + "(a+)+" * 50 + "' }}" + body, "{% generation %}" * 50 + body, "{% generation %}{{ 1/0 }}{% endgeneration %}",
            "{{ messages|tojson(indent=%d) }}" % min(n, 10**9), "{{ 'a'|urlize(trim_url_limit=%d) }}" % n, "{{ ('x' * 10**6)|urlize }}",
            "{% for i in range(10**5) recursive %}{{ loop(range(2)) }}{% endfor %}", "{{ cycler(*range(10**5)).next() }}" + body,
            "{{ messages|sort(attribute='content.x.y')|list }}", "{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ ns }}",
        ]
    )  # fmt: skip


def hostile_template(draw: random.Random, folder: Path) -> Outcome:
    text, asked = template(draw), command(draw)
    if draw.random() < 0.4 and asked[0] == "inspect":
        (folder / "own.jinja").write_text(text, encoding="utf-8")
        asked = [*asked, "data.template=own.jinja"]
    else:
        (folder / "target" / "chat_template.jinja").write_text(text, encoding="utf-8")
    ended = run(asked, folder)
    return judged(f"template, {asked[0]}", f"{text[:300]!r}; {' '.join(asked)}", ended, folder)


def hostile_index(draw: random.Random, folder: Path) -> Outcome:
    """An index of weights that leads elsewhere, or is no index."""
    file = folder / "target" / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    weights = index["weight_map"]
    name = draw.choice(sorted(weights))
    shutil.copy(folder / "target" / weights[name], folder / "elsewhere.safetensors")
    there = draw.choice(
        ["../elsewhere.safetensors", str(folder / "elsewhere.safetensors"), "/etc/passwd", "/dev/zero", "missing.safetensors", "config.json",
         "", ".", "a\0b", 3, None, ["x"], {"a": 1}, "model.safetensors.index.json", "/dev/stdin", "../" * 40 + "etc/hostname", "x" * 5000]
    )  # fmt: skip
    how = draw.randrange(6)
    if how == 0:
        for key in weights:
            weights[key] = there
    elif how == 1:
        index["weight_map"] = draw.choice([None, [], 3, "x", {}])
    elif how == 2:
        index = draw.choice([[], {}, None, "x", {"metadata": {}}])
    elif how == 3:
        weights["lm_head.weight.more"] = there
    else:
        weights[name] = there
    file.write_text(json.dumps(index))
    asked = command(draw)
    while asked[0] == "inspect":
        asked = command(draw)
    ended = run(asked, folder)
    return judged(f"index, {asked[0]}", f"{how}, {name} in {there!r:.60}; {' '.join(asked)}", ended, folder)


def hostile_safetensors(draw: random.Random, folder: Path) -> Outcome:
    """A header that claims too much."""
    checkpoint = draw.random() < 0.5
    place = folder / ("medusa/step-00006" if checkpoint else "target")
    file = draw.choice(sorted(place.glob("*.safetensors")))
    content = file.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header, body = json.loads(content[8 : 8 + size]), content[8 + size :]
    names = [name for name in header if name != "__metadata__"]
    name = draw.choice(names)
    how = draw.randrange(9)
    if how == 0:
        header[name]["shape"] = [2**40, 2**40]
    elif how == 1:
        header[name]["data_offsets"] = draw.choice([[0, 2**62], [-4, 4], [8, 4], [0, 0], "x", None])
    elif how == 2:
        header[name]["dtype"] = draw.choice(["F128", "", None, "I8", "BOOL"])
    elif how == 3:
        other = draw.choice(names)
        header[name]["data_offsets"] = header[other]["data_offsets"]
    elif how == 4:
        header["../../x"] = header.pop(name)
    elif how == 5:
        header["__metadata__"] = {"format": "\x1b[2J", "a": "b" * 10**6}
    text = json.dumps(header).encode()
    if how == 6:
        text = b"[" * 100_000
    claimed = draw.choice([2**63, 2**64 - 1, len(text) + 10**9, 0]) if how == 7 else len(text)
    file.write_bytes(struct.pack("<Q", claimed) + text + (b"" if how == 8 else body))
    asked = ["measure", *TARGET, "checkpoint=medusa/step-00006", PROMPTS, *MEASURING, "output=result"]
    ended = run(asked, folder)
    what = "safetensors of a checkpoint" if checkpoint else "safetensors of a target"
    return judged(what, f"{how} in {file.name}, {name}; {' '.join(asked)}", ended, folder)


class Payload:
    """Unpickled, it makes the marker."""

    def __init__(self, place: Path) -> None:
        self.place = str(place)

    def __reduce__(self) -> tuple[object, ...]:
        return open, (self.place, "w")


def hostile_pickle(draw: random.Random, folder: Path) -> Outcome:
    """Where weights, states or data are looked for."""
    import torch

    content = pickle.dumps(Payload(folder / MARKER))
    if draw.random() < 0.5:
        torch.save({"a": Payload(folder / MARKER)}, folder / "x.pt")
        content = (folder / "x.pt").read_bytes()
        (folder / "x.pt").unlink()
    where = draw.randrange(8)
    asked = ["measure", *TARGET, "checkpoint=medusa/step-00006", PROMPTS, *MEASURING, "output=result"]
    refuse = True
    if where == 0:
        for file in (folder / "target").glob("*.safetensors*"):
            file.unlink()
        (folder / "target" / "pytorch_model.bin").write_bytes(content)
    elif where == 1:
        (folder / "target" / "pytorch_model.bin").write_bytes(content)
        refuse = False
    elif where == 2:
        file = draw.choice(sorted((folder / "target").glob("*.safetensors")))
        file.write_bytes(content)
    elif where == 3:
        file = draw.choice(sorted((folder / "medusa" / "step-00006").iterdir()))
        file.write_bytes(content)
        refuse = file.name in ("drafter.json", "drafter.safetensors")
    elif where == 4:
        (folder / "published").mkdir()
        (folder / "published" / "config.json").write_text('{"medusa_num_heads": 2, "medusa_num_layers": 1, "hidden_size": 32}')
        (folder / "published" / draw.choice(["medusa_lm_head.pt", "pytorch_model.bin"])).write_bytes(content)
        asked[3] = "checkpoint=published"
    elif where == 5:
        name = draw.choice(["data.pkl", "data.arrow", "data.parquet", "data.jsonl", "data.jsonl.gz", "data.json", "data.csv", "data.pt"])
        (folder / f"own-{name}").write_bytes(content)
        asked = ["inspect", *TARGET, f"data.path=own-{name}", "out=page.html"]
    elif where == 6:
        name = draw.choice(["tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"])
        (folder / "target" / name).write_bytes(content)
        refuse = name != "generation_config.json"
    else:
        (folder / "features").mkdir()
        (folder / "features" / "x.pt").write_bytes(content)
        name = draw.choice(["prompts.jsonl", "data.jsonl"])
        (folder / name).write_bytes(content)
        asked = ["fit", *TARGET, "data.path=data.jsonl", *TRAINING, "recipe=medusa", PROMPTS, *MEASURING, "train.steps=1",
                 "features=cached", "features.dir=features", "output=result"]  # fmt: skip
        refuse = False
    ended = run(asked, folder)
    return judged(f"pickle, {asked[0]}", f"place {where}; {' '.join(asked)}", ended, folder, refuse)


def hostile_archive(draw: random.Random, folder: Path) -> Outcome:
    """Archives whose members lead elsewhere, a bomb, links in a data folder."""
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
    asked = ["inspect", *TARGET, f"data.path={path}", "out=page.html"] if how != 5 else command(draw)
    ended = run(asked, folder)
    return judged(f"archives and links, {asked[0]}", f"{how}; {' '.join(asked)}", ended, folder)


def hostile_page(draw: random.Random, folder: Path) -> Outcome:
    """HTML in prompts, their ids and categories, data, and names: no page has it unescaped."""
    lines = [
        {"question_id": draw.choice(PAYLOADS), "category": draw.choice(PAYLOADS), "turns": [f"say {draw.choice(PAYLOADS)}"]} for _ in range(3)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    records = [{"messages": [{"role": "user", "content": draw.choice(PAYLOADS)}, {"role": "assistant", "content": draw.choice(PAYLOADS)}]} for _ in range(9)]
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    name = draw.choice(["measure", "inspect", "fit"])
    own = draw.choice(["result", f"<script>{SEEN}()<", f"a\"onload={SEEN}()", f"'{SEEN}"])
    asked = {
        "measure": ["measure", *TARGET, "checkpoint=medusa/step-00006", PROMPTS, *MEASURING, f"output={own}"],
        "inspect": ["inspect", *TARGET, "data.path=data.jsonl", PROMPTS, "out=page.html", "data.max_length=512"],
        "fit": ["fit", *TARGET, "data.path=data.jsonl", *TRAINING, "data.max_length=512", "recipe=medusa", PROMPTS, *MEASURING, "train.steps=1", "data.held_out=2",
                f"output={own}"],
    }[name]  # fmt: skip
    ended = run(asked, folder)
    outcome = judged(f"HTML, {name}", " ".join(asked), ended, folder)
    if outcome.result == FAILURE or ended.code:
        return outcome if outcome.result == FAILURE else failed(f"HTML, {name}", "a page", f"exit code {ended.code}: {ended.line}", " ".join(asked), ended)
    for page in folder.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        if bad := unescaped(text):
            return failed(f"HTML, {name}", "every payload is escaped", f"{page.name}: {bad}", " ".join(asked), ended)
    return outcome


def unescaped(text: str) -> str | None:
    """The first place of a page where a payload is markup."""
    for raw in (f"<script>alert('{SEEN}", f"<img src=x onerror={SEEN}", f"<script>{SEEN}", f"<svg onload={SEEN}", f"<b>{SEEN}", f"<style>{SEEN}",
                f"<iframe srcdoc", f'href="javascript:{SEEN}', f"<!--<script>{SEEN}"):  # fmt: skip
        if (at := text.find(raw)) >= 0:
            return text[max(0, at - 60) : at + 80]
    return None


def hostile_escapes(draw: random.Random, folder: Path) -> Outcome:
    """Terminal escapes in prompts, data, and names of all kinds: the console shows none of them raw."""
    escape = draw.choice(ESCAPES)
    lines = [{"question_id": f"a{escape}", "category": f"b{escape}", "turns": [f"say {escape}"]} for _ in range(2)]
    records = [{"messages": [{"role": "user", "content": f"x{escape}"}, {"role": "assistant", "content": f"y{escape}"}]} for _ in range(9)]
    asked = command(draw)
    how = draw.randrange(12)
    if how == 0:
        records[1]["messages"][0]["role"] = escape
        asked = ["inspect", *TARGET, "data.path=data.jsonl", "out=page.html"]
    elif how == 1:
        lines[1] = {f"tur{escape}ns": ["x"]}
        records[1] = {f"mess{escape}ages": []}
    elif how == 2:
        asked = ["inspect", *TARGET, f"data.path=no{escape}thing.jsonl", "out=page.html"]
    elif how == 3:
        asked = ["measure", *TARGET, f"checkpoint=no{escape}thing", PROMPTS]
    elif how == 4:
        asked = [f"meas{escape}ure"] if draw.random() < 0.5 else ["fit", f"reci{escape}pe=x"]
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
        asked = ["measure", *TARGET, "checkpoint=medusa/step-00006", PROMPTS]
    elif how == 9:
        (folder / f"t{escape}").symlink_to("target")
        asked = [word.replace("target.path=target", f"target.path=t{escape}") for word in asked]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    ended = run(asked, folder)
    what = f"terminal escapes, {asked[0] if asked[0].isalpha() else 'names'}"
    return judged(what, f"{how}, {escape!r}; {' '.join(asked)!r}", ended, folder)


def foreign_code(draw: random.Random, folder: Path) -> Outcome:
    """Python that comes with a model is not run unless `target.trust_remote_code=true`."""
    code = f"open({str(folder / MARKER)!r}, 'w')\n"
    target = folder / "target"
    for name in ("modeling_own.py", "configuration_own.py", "tokenization_own.py", "__init__.py", "conftest.py", "drafttrain.py", "sitecustomize.py"):
        (target / name).write_text(code)
        (folder / name).write_text(code)
        (folder / "medusa" / "step-00006" / name).write_text(code)
    config = json.loads((target / "config.json").read_text())
    how = draw.randrange(4)
    if how in (0, 2):
        config["auto_map"] = {"AutoConfig": "configuration_own.Own", "AutoModelForCausalLM": "modeling_own.Own"}
        config["model_type"] = draw.choice(["own", "llama"])
    if how in (1, 2):
        tokens = json.loads((target / "tokenizer_config.json").read_text())
        tokens["auto_map"] = {"AutoTokenizer": ["tokenization_own.Own", None]}
        tokens["tokenizer_class"] = draw.choice(["Own", "PreTrainedTokenizerFast"])
        (target / "tokenizer_config.json").write_text(json.dumps(tokens))
    if how == 3:
        config["architectures"] = ["modeling_own.Own"]
    (target / "config.json").write_text(json.dumps(config))
    asked = command(draw)
    ended = run(asked, folder)
    return judged(f"code with a model, {asked[0]}", f"{how}; {' '.join(asked)}", ended, folder)


Attack = Callable[[random.Random, Path], Outcome]
ATTACKS: tuple[Attack, ...] = (
    hostile_template, hostile_template, hostile_index, hostile_safetensors, hostile_pickle, hostile_archive, hostile_page,
    hostile_escapes, hostile_escapes, foreign_code,
)  # fmt: skip
