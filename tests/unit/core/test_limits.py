"""Limits stand beside the fields of options, and one function checks them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from drafttrain.core.errors import UserError
from drafttrain.core.limits import above, at_least, check_limits, choice, share, within


@dataclass
class Inner:
    form: str = choice("auto", "text")
    count: int | None = at_least(None, 1)


@dataclass
class Options:
    name: str = choice("a", "b")
    middle: int = choice(2, 1, 2, 3)
    engine: str | None = choice(None, "x", "y")
    action: str = choice("off", "stop")
    steps: int = at_least(4, 1)
    nodes: int | None = at_least(24, 1, null=True)
    bytes: int = at_least(2**30, 2**20)
    start: float = at_least(0.0, 0, below=1)
    rate: float = above(0.5, 0)
    level: float = above(0.05, 0, below=1)
    part: float = share(1.0)
    alpha: float = within(0.5, 0, 1)
    sizes: list[int] = at_least([1, 4], 1)
    betas: tuple[float, float] = at_least((0.9, 0.95), 0, below=1)
    also: list[str] = choice(["a"], "b")
    free: str = "anything"
    inner: Inner = field(default_factory=Inner)
    several: list[Inner] = field(default_factory=list)
    of_any_kind: Any = None


@dataclass
class Narrow(Options):
    name: str = "b"
    steps: int = 2


REFUSED = (
    ({"name": "c"}, "group.name is 'c'; choose one of a, b"),
    ({"name": None}, "group.name is None; choose one of a, b"),
    ({"middle": 4}, "group.middle is 4; choose one of 1, 2, 3"),
    ({"engine": "z"}, "group.engine is 'z'; choose one of x, y, or null"),
    ({"action": "False"}, "group.action is 'False'; choose one of off, stop (quote 'off' in YAML)"),
    ({"steps": 0}, "group.steps is 0; set it to 1 or more"),
    ({"steps": "many"}, "group.steps is 'many'; set it to 1 or more"),
    ({"steps": []}, "group.steps is []; set it to 1 or more"),
    ({"nodes": 0}, "group.nodes is 0; set it to 1 or more, or null"),
    ({"bytes": 3}, "group.bytes is 3; set it to 1048576 or more"),
    ({"start": 1.0}, "group.start is 1; set it to 0 or more and below 1"),
    ({"rate": 0.0}, "group.rate is 0; set it above 0"),
    ({"rate": float("nan")}, "group.rate is nan; set it above 0"),
    ({"level": 1.0}, "group.level is 1; set it above 0 and below 1"),
    ({"part": 0.0}, "group.part is 0; set it above 0 and at most 1"),
    ({"part": 1.5}, "group.part is 1.5; set it above 0 and at most 1"),
    ({"alpha": -0.1}, "group.alpha is -0.1; set it within 0 and 1"),
    ({"sizes": [4, 0]}, "group.sizes has 0; set it to 1 or more"),
    ({"betas": [0.9, 1.0]}, "group.betas has 1; set it to 0 or more and below 1"),
    ({"also": ["b", "c"]}, "group.also has 'c'; choose one of a, b"),
    ({"inner": Inner("json")}, "group.inner.form is 'json'; choose one of auto, text"),
    ({"several": [Inner(), Inner(count=0)]}, "group.several[1].count is 0; set it to 1 or more, or null"),
    ({"of_any_kind": Inner("json")}, "group.of_any_kind.form is 'json'; choose one of auto, text"),
)


def test_check_limits_value_out_of_limit_is_refused_with_what_got_and_fix(subtests: pytest.Subtests) -> None:
    for changes, message in REFUSED:
        with subtests.test(changes=changes):
            with pytest.raises(UserError) as refused:
                check_limits("group", replace(Options(), **changes))
            assert str(refused.value) == message


def test_check_limits_allowed_values_pass(subtests: pytest.Subtests) -> None:
    edges: tuple[dict[str, Any], ...] = (
        {},
        {"engine": "y", "nodes": None, "sizes": [], "also": ["b", "a"], "free": "", "of_any_kind": [{"form": "json"}]},
        {"steps": 1, "start": 0.0, "rate": float("inf"), "part": 1.0, "alpha": 0.0, "betas": (0, 0.999), "several": [Inner()]},
    )
    for changes in edges:
        with subtests.test(changes=changes):
            check_limits("group", replace(Options(), **changes))


def test_check_limits_without_prefix_names_the_key_alone() -> None:
    with pytest.raises(UserError, match=r"^inner\.count is 0; "):
        check_limits("", Options(inner=Inner(count=0)))


def test_check_limits_subclass_with_other_default_keeps_the_limit() -> None:
    assert (Narrow().name, Narrow().steps) == ("b", 2)
    check_limits("", Narrow())
    for changes in ({"name": "c"}, {"steps": 0}):
        with pytest.raises(UserError, match=rf"^{next(iter(changes))} is "):
            check_limits("", replace(Narrow(), **changes))


def test_limited_field_list_default_is_made_for_each_object() -> None:
    one = Options()
    one.sizes.append(0)
    assert Options().sizes == [1, 4]
