"""The package's exceptions, and text that is safe to print."""

import re

UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
HEAD, TAIL = 1200, 400  # characters of a longer line that are shown


def printable(text: str) -> str:
    """Foreign text that is safe to print on a terminal.

    Control characters, and characters that change the direction of writing, become escapes: the escape character becomes the
    four characters `\\x1b`. Newlines and tabs stay.
    """
    return UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """The text as one printable line. A very long one is shortened in the middle, since messages end with the fix."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= HEAD + TAIL else f"{line[:HEAD]} ... {line[-TAIL:]}"


class UserError(ValueError):
    """Bad input. The message says what was expected, what was found and how to fix it. The command line exits with 2."""

    def __str__(self) -> str:
        return one_line(super().__str__())


class Interrupted(BaseException):
    """SIGTERM or SIGUSR1 ended a run, which `resume=auto` continues. The command line exits with `Interrupted.CODE`.

    Like KeyboardInterrupt it is no Exception, so that no handler takes it for a failure. together: all processes end at the
    same step.
    """

    CODE = 75  # EX_TEMPFAIL of sysexits.h: try again

    def __init__(self, when: str, together: bool = False) -> None:
        super().__init__(when)
        self.together = together


class WorkerError(RuntimeError):
    """A process that a command started has failed; its own message is on stderr. The command line exits with 1."""


class ParityError(RuntimeError):
    """An export does not draft as its checkpoint does. The command line exits with `ParityError.CODE`.

    `export` removes the files of such an export again; `verify`, which runs it in an engine, keeps them. name: the part that
    differs (layer ids, d2t, tensors, ...).
    """

    CODE = 3

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"Parity: {name}: {text}")
        self.name = name


class OutputError(RuntimeError):
    """A policy that promises the target's own output gave another. The command line exits with `OutputError.CODE`."""

    CODE = 4
