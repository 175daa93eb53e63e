"""Many random requests over few slots and scarce pages: every text is plain decoding's, and nothing is lost."""

from __future__ import annotations

import pytest

from drafttrain.targets.fast import FastTarget
from tests.faults.storm import storm
from tests.helpers import tiny_model
from tests.tiny import NAMES, build

TARGET = FastTarget(tiny_model())


@pytest.mark.sampled(name=(None, "eagle3"))
@pytest.mark.parametrize("name", [None, *NAMES])
def test_session_random_requests_with_scarce_pages_equal_plain_decoding(name: str | None) -> None:
    storm(TARGET, None if name is None else build(name, TARGET, 0.3), 24, seed=1, every=None)


@pytest.mark.slow
@pytest.mark.sampled(name=(None, "medusa", "draft_model", "cascade"))
@pytest.mark.parametrize(("seed", "every"), [(1, None), (2, 2)])
@pytest.mark.parametrize("name", [None, *NAMES])
def test_session_many_random_requests_equal_plain_decoding(name: str | None, seed: int, every: int | None) -> None:
    storm(TARGET, None if name is None else build(name, TARGET, 0.3), 60, seed, every)
