"""What a user did wrong, in one line."""

import re

UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
HEAD, TAIL = 1200, 400  # characters of a longer line that are shown


def printable(text: str) -> str:
    """Text of others for a terminal: control characters, which it would act on, as escapes, those that turn the direction of
    writing too; newlines and tabs stay. Worked example: an escape character becomes the four characters `\\x1b`.
    """
    return UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """The same in one printable line; of a very long one the beginning and the end, where the way out is."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= HEAD + TAIL else f"{line[:HEAD]} ... {line[-TAIL:]}"


class UserError(ValueError):
    """Bad input: the message says what was expected, what was got, and the way out. The command line exits with 2."""

    def __str__(self) -> str:
        return one_line(super().__str__())


class Interrupted(BaseException):
    """SIGTERM or SIGUSR1 ended a run that `resume=auto` goes on with. The command line exits with `Interrupted.CODE`.

    together: all processes end at the same step. No Exception, as KeyboardInterrupt is none: nothing on its way out may take
    it for a failure.
    """

    CODE = 75  # EX_TEMPFAIL of sysexits.h: try again

    def __init__(self, when: str, together: bool = False) -> None:
        super().__init__(when)
        self.together = together


class WorkerError(RuntimeError):
    """A process that was started for a command has failed, and what it said is on stderr. The command line exits with 1."""


class ParityError(RuntimeError):
    """What was exported does not draft as its checkpoint does: an export that fails so is gone again, one that an engine fails
    with stays. The command line exits with `ParityError.CODE`.

    name: what differs (layer ids, d2t, tensors, ...).
    """

    CODE = 3

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"Parity: {name}: {text}")
        self.name = name


class OutputError(RuntimeError):
    """A policy that promises the target's own output did not keep it. The command line exits with `OutputError.CODE`."""

    CODE = 4


def check_at_least(least: int, group: str, options: object, *names: str) -> None:
    """Raise UserError unless each of these options of a configuration group is None or at least `least`."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < least:
            raise UserError(f"{group}.{name} is {value}; set it to {least} or more")
