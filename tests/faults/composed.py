"""A command line's configuration, composed by Hydra once for all tries that use it, because that takes most of the time."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from drafttrain.cli.config import Run


class _ComposedError(BaseException):
    """Ends the command when its configuration is complete. It is no Exception, because Hydra would print it."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run


@cache
def composed(arguments: tuple[str, ...]) -> Run | None:
    """Hydra's configuration for these arguments; None where Hydra or the check of the words refuses them."""
    from drafttrain.cli import config
    from drafttrain.cli import main as cli

    to_run, argv = config.to_run, sys.argv
    sys.argv = ["drafttrain"]

    def end(composed: Any) -> Run:
        raise _ComposedError(to_run(composed))

    config.to_run = end
    try:
        cli._dispatch(list(arguments))
    except _ComposedError as found:
        return found.run
    except (cli.Stop, Exception):  # the child repeats the error, with its full output
        return None
    finally:
        config.to_run, sys.argv = to_run, argv
    return None


def cli(arguments: Sequence[str]) -> Callable[[], int]:
    """`drafttrain ARGUMENTS` as work for `forked`. Everything except Hydra's part runs in the child."""
    plain = all(word.isascii() and word.isprintable() for word in arguments)
    run = composed(tuple(arguments)) if plain else None

    def work() -> int:
        import hydra

        from drafttrain.cli import config
        from drafttrain.cli import main as cli

        sys.argv = ["drafttrain"]
        if run is not None:
            hydra.main = lambda **settings: lambda task: lambda: task(None)
            config.register = lambda config_dir=None: None
            config.to_run = lambda composed: copy.deepcopy(run)
        return cli.run(list(arguments))

    return work
