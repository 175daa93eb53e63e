"""Chat templates that never end, fill memory, fail, or reach for the interpreter."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from tests.faults.attack import MARKER, command, judged, run
from tests.faults.campaign import TryResult

SIZES = (10**3, 10**6, 10**9, 10**12)
BODY = "{% for m in messages %}{{ m.content }}{% endfor %}"
TOUCH = f"touch {MARKER}"
REACHES = (  # attempts to reach the interpreter from the template
    "''.__class__.__mro__[1].__subclasses__()",
    f"cycler.__init__.__globals__.os.popen('{TOUCH}').read()",
    f"lipsum.__globals__['os'].system('{TOUCH}')",
    f"self.__init__.__globals__['__builtins__']['open']('{MARKER}', 'w')",
    f"joiner['__init__']['__globals__']['os'].system('{TOUCH}')",
    "messages|map(attribute='__class__')|list",
    "(messages|attr('__class__')|attr('__mro__'))[1]",
    "namespace.__init__.__globals__",
    f"raise_exception.__globals__['os'].system('{TOUCH}')",
    "tojson.__globals__",
    f"strftime_now.__globals__['sys'].modules['os'].system('{TOUCH}')",
    "'{0.__class__.__init__.__globals__}'.format(messages)",
    "'%s'|format(messages)",
    f"'{'%s' * 10**4}'|format(messages)",
)
PLAIN = (
    "{{ 1 / 0 }}",
    "{{ 1 // 0 }}",
    "{{ 5 % 0 }}",
    "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 10 ** (10 ** 3) }}",
    "{{ 10 ** (10 ** 8) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{% extends 'x' %}",
    "{{ messages[0].content.nothing.there }}",
    "{{ raise_exception('\x1b[2J no') }}",
    "{{ raise_exception('a\nb') }}",
    "{{ messages.clear() }}",
    "{{ messages.append(messages) }}{{ messages }}",
    "{% set _ = messages.pop() %}{{ messages }}",
    "{{ ('a,' * 10**6)|wordwrap(1) }}",
    "{% if %}",
    "{{",
    "{% for m in messages %}",
    "{{ 'a' * 10**9 * 10**9 }}",
    "",
    "\x1b[2J" + BODY,
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "{{ '" + "(a+)+" * 50 + "' }}" + BODY,
    "{% generation %}" * 50 + BODY,
    "{% generation %}{{ 1/0 }}{% endgeneration %}",
    "{{ ('x' * 10**6)|urlize }}",
    "{% for i in range(10**5) recursive %}{{ loop(range(2)) }}{% endfor %}",
    "{{ cycler(*range(10**5)).next() }}" + BODY,
    "{{ messages|sort(attribute='content.x.y')|list }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ ns }}",
)
SIZED: tuple[Callable[[int], str], ...] = (
    lambda n: f"{{% for i in range({n}) %}}{{{{ i }}}}{{% endfor %}}",
    lambda n: f"{{{{ 'a' * {n} }}}}",
    lambda n: f"{{{{ [0] * {n} }}}}",
    lambda n: f"{{% set n = namespace(s='x') %}}{{% for i in range({n % 61 + 5}) %}}{{% set n.s = n.s ~ n.s %}}{{% endfor %}}",
    lambda n: f"{{{{ '%{min(n, 10**9)}d' | format(1) }}}}",
    lambda n: f"{{{{ 'a'.center({n}) }}}}",
    lambda n: f"{{{{ 'a'.ljust({n})|length }}}}",
    lambda n: f"{{{{ 'aaaa'|replace('', 'b' * {min(n, 10**8)}) }}}}",
    lambda n: f"{{{{ lipsum(n={min(n, 10**7)}) }}}}",
    lambda n: f"{{{{ range({n})|list|length }}}}",
    lambda n: f"{{{{ 'a'|indent({n}) }}}}",
    lambda n: f"{{{{ messages|tojson(indent={min(n, 10**9)}) }}}}",
    lambda n: f"{{{{ 'a'|urlize(trim_url_limit={n}) }}}}",
)


def template(draw: random.Random) -> str:
    kind = draw.randrange(3)
    if kind == 0:
        return draw.choice(PLAIN)
    if kind == 1:
        return draw.choice(SIZED)(draw.choice(SIZES))
    return draw.choice(["", BODY]) + f"{{{{ {draw.choice(REACHES)} }}}}"


def hostile_template(draw: random.Random, folder: Path) -> TryResult:
    text, asked = template(draw), command(draw)
    if draw.random() < 0.4 and asked[0] == "inspect":
        (folder / "own.jinja").write_text(text, encoding="utf-8")
        asked = (*asked, "data.template=own.jinja")
    else:
        (folder / "target" / "chat_template.jinja").write_text(text, encoding="utf-8")
    ended = run(asked, folder)
    return judged(f"template, {asked[0]}", f"{text[:300]!r}; {' '.join(asked)}", ended, folder)
