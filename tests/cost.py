"""What tests cost: `python -m tests.cost [--tests] ARGUMENTS_OF_PYTEST` prints processor seconds and cases by file, or by test.

Those of this process and of the processes that a test starts and waits for, so that other work on the machine changes little.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Generator

import pytest


class Cost:
    """A plugin of pytest that adds up the processor time of each case, its fixtures included."""

    def __init__(self, by: str) -> None:
        self.by, self.seconds, self.cases = by, Counter[str](), Counter[str]()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        before = spent()
        try:
            return (yield)
        finally:
            name = item.nodeid.split(self.by)[0]
            self.seconds[name] += spent() - before
            self.cases[name] += 1

    def table(self) -> str:
        rows = [f"{seconds:9.1f} {self.cases[name]:6d}  {name}" for name, seconds in self.seconds.most_common()]
        total = f"{self.seconds.total():9.1f} {self.cases.total():6d}  in all"
        return "\n".join([f"{'seconds':>9} {'cases':>6}", *rows, total])


def spent() -> float:
    """Processor seconds of this process and of those that have ended."""
    return sum(os.times()[:4])


def main(arguments: list[str]) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    cost = Cost("[" if "--tests" in arguments else "::")
    code = pytest.main([argument for argument in arguments if argument != "--tests"], plugins=[cost])
    print(cost.table())
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
