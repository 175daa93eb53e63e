"""A random target on disk, texts for it, and a server of its states."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests import forked
from tests.helpers import tiny_model
from tests.standin.served import States, states_server
from tests.tokenizers import save_bytes_tokenizer


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target with a byte tokenizer, and texts of uneven length."""
    folder = tmp_path_factory.mktemp("material")
    save_bytes_tokenizer(folder / "target")
    tiny_model().save_pretrained(folder / "target")
    generator = torch.Generator().manual_seed(0)
    lines = []
    for _ in range(40):
        size = int(torch.randint(12, 60, (1,), generator=generator))
        letters = torch.randint(0, 26, (size,), generator=generator).tolist()
        lines.append(json.dumps({"text": "".join(chr(97 + c) for c in letters)}))
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    """By a test that fails: it would slow down those that follow."""
    with forked.none_left():
        yield


@pytest.fixture(scope="session")
def states(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[States]:
    """A server of the target's last state that nothing disturbs."""
    with states_server(material, tmp_path_factory.mktemp("states") / "states") as served:
        yield served
