"""Stand-ins for serving engines as processes of their own, and the options of runs on their states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests import forked

STEPS = ("recipe=medusa", "train.steps=12", "train.checkpoint_every=4")


@dataclass
class States:
    """A server of states. folder: of its files, unless the states go to Mooncake's store."""

    port: int
    process: forked.Forked
    folder: Path | None

    def asked(self, *more: str) -> tuple[str, ...]:
        """Options of a run on its states."""
        address = f"features.servers=[http://127.0.0.1:{self.port}]"
        return (*STEPS, "features=engine", address, "data.max_length=64", *more)

    def left(self) -> list[Path]:
        """Files that no trainer has removed."""
        return list(self.folder.iterdir()) if self.folder else []


@contextmanager
def states_server(material: Path, where: Path | str, layers: str = "4", faults: str = "{}", port: int = 0) -> Iterator[States]:
    """The stand-in for vLLM. where: the folder of its files, or the address of Mooncake's master. port: 0 for a free one."""
    name = f"tests.standin.{'mooncake' if isinstance(where, str) else 'states'}_server"
    with forked.module(name, str(material / "target"), str(where), layers, str(port), faults) as process:
        yield States(_port(process), process, where if isinstance(where, Path) else None)


@contextmanager
def sglang_server(material: Path, arguments: str, faults: str = "{}") -> Iterator[States]:
    """The stand-in for SGLang. arguments: of its process, as JSON."""
    with forked.module("tests.standin.sglang_server", str(material / "target"), "0", arguments, faults) as process:
        yield States(_port(process), process, None)


def _port(process: forked.Forked) -> int:
    return int(process.wait_for(r"^ready (\d+)$")[1])
