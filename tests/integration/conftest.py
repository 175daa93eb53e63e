"""A random target on disk, and texts for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.helpers import tiny_model
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
