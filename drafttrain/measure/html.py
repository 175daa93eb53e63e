"""Pages of one HTML file each, which ask nothing of a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2

ASSETS = Path(__file__).parents[1] / "assets"


def render(template: str, **values: Any) -> str:
    """A template of `assets/`, which may include others from there. Values are escaped."""
    loader = jinja2.FileSystemLoader(ASSETS)
    return (
        jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
        .get_template(template)
        .render(values)
    )


def script_json(value: Any) -> str:
    """JSON to stand in a <script> element: no text in it ends the element or opens a comment."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
