"""Many random requests over few slots and scarce pages: every text is plain decoding's, and nothing is lost."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from drafttrain.drafter import Drafter
from drafttrain.kv import PAGE, pages_for
from drafttrain.request import Request, Result
from drafttrain.sampling import Sampling
from drafttrain.session import Session
from drafttrain.speculate import Controls, Decoder
from drafttrain.targets.fast import FastTarget
from tests.contract.test_families import NAMES, build
from tests.helpers import some, tiny_model

TARGET = FastTarget(tiny_model())
SAMPLING = Sampling(0.9, seed=5)
SLOTS, LONGEST = 5, 96  # of a prompt with its new tokens


def requests(count: int, seed: int) -> list[Request]:
    """Prompts from one token to the limit, one to four samples, many that end at once or by a stop token."""
    draw, found = random.Random(seed), []
    for number in range(count):
        length = draw.choice([1, 2, 31, 32, 33, draw.randint(1, LONGEST - 1), LONGEST - 1])
        new = min(draw.choice([1, 1, 2, draw.randint(1, 30)]), LONGEST - length)
        prompt = [draw.randrange(64) for _ in range(length)]
        stop = frozenset(draw.sample(range(64), draw.choice([0, 0, 3, 12])))
        least = draw.randint(0, new) if stop else 0
        found.append(Request(prompt, 10 * number, new, least, stop, samples=draw.choice([1, 1, 1, 2, 3, 4])))
    return found


def served(session: Session, asked: Sequence[Request], draw: random.Random) -> list[Result]:
    """Submitted a few at a time, between steps."""
    results: list[Result] = []
    waiting = list(asked)
    while waiting or session.busy:
        for _ in range(draw.choice([0, 1, 6])):
            if waiting:
                results += session.submit(waiting.pop(0))
        session.step()
    return results


def storm(drafter: Drafter | None, count: int, seed: int, every: int | None) -> None:
    asked, draw = requests(count, seed), random.Random(seed)
    plain = Session(Decoder(TARGET, None, "coupled", SAMPLING), SLOTS, LONGEST + 1)
    wanted = [result.tokens for result in served(plain, asked, draw)]
    decoder = Decoder(TARGET, drafter, "coupled", SAMPLING, controls=Controls(read_every=every))
    room = LONGEST + decoder.scratch
    least = max(r.samples * pages_for(decoder.positions(r)) - (r.samples - 1) * (len(r.prompt) // PAGE) for r in asked)
    for pages in (least, least + draw.randint(1, 8), SLOTS * pages_for(room)):
        session = Session(decoder, SLOTS, room, pages)
        found = served(session, asked, draw)
        assert [result.tokens for result in found] == wanted
        assert session.kv.free_pages == session.kv.pages == pages and sorted(session.free) == list(range(SLOTS))
        assert not session.active and set(session.kv._uses) == {0}


@pytest.mark.parametrize("name", some([None, *NAMES], 4))
def test_scarce_pages_and_samples(name: str | None) -> None:
    storm(None if name is None else build(name, TARGET, 0.3), 24, seed=1, every=None)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "every"), [(1, None), (2, 2)])
@pytest.mark.parametrize("name", [None, *NAMES])
def test_a_storm(name: str | None, seed: int, every: int | None) -> None:
    storm(None if name is None else build(name, TARGET, 0.3), 60, seed, every)
