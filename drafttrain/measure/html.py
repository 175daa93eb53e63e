"""Renders pages as single HTML files that work offline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2

ASSETS = Path(__file__).parents[1] / "assets"


def render(template: str, **values: Any) -> str:
    """Render a template of `assets/`, which may include other files of that folder. Values are escaped."""
    loader = jinja2.FileSystemLoader(ASSETS)
    return (
        jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
        .get_template(template)
        .render(values)
    )


def script_json(value: Any) -> str:
    """JSON that is safe inside a <script> element: it cannot end the element or open a comment."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
