"""The folders of servers that a run starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from drafttrain.cli.config import compose_run
from drafttrain.core.errors import UserError
from drafttrain.runs import states_servers


def test_features_dir_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    options = compose_run("medusa", ["data.path=x", "features=engine", f"features.dir={tmp_path / 'file' / 'states'}"]).options
    with pytest.raises(UserError, match=r"file/states for the servers' states cannot be made .*; set features.dir"):
        states_servers._folder(options)
