"""The package's exceptions, text that is safe to print, and failures of the Hugging Face hub in one clause."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from pathlib import Path

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


ACCESS = "accept its terms or ask for access at"
LOGIN = "hf auth login, or set HF_TOKEN"
SHOWN = 120  # characters of a transport error


def hub_reason(error: BaseException, name: str, kind: str = "model", revision: str | None = None) -> str | None:
    """Why a model or data set (kind: model | dataset) could not be read from the hub, and the fix; None for other errors.

    transformers and datasets wrap the hub's errors in their own, whose text is long or says something else. The cause is found
    in the chain of exceptions.

    Worked example: `it is gated; accept its terms or ask for access at https://huggingface.co/a/b, with the login of HF_TOKEN`.
    """
    from huggingface_hub import constants  # slow to import
    from huggingface_hub import errors as hub

    chain = list(_chain(error))
    if gated_error := _first(chain, hub.GatedRepoError):
        page = f"https://huggingface.co/{'datasets/' if kind == 'dataset' else ''}{name}"
        refused = getattr(getattr(gated_error, "response", None), "status_code", None) == 403
        login = "with the login that is used here" if refused else f"and log in: {LOGIN}"
        return f"{name} is gated; {ACCESS} {page}, {login}"
    if _first(chain, hub.RevisionNotFoundError):
        revision_text = f"revision {revision!r}" if revision else "such revision"
        return f"{name} has no {revision_text}; name a branch, a tag or a commit that its page lists"
    if _first(chain, hub.RepositoryNotFoundError):
        missing = f"the hub has no {'data set' if kind == 'dataset' else kind} {name}, or it is private"
        if logged_in():
            return f"{missing} and the login that is used may not read it; correct the name, or use another login"
        return f"{missing} and no login is given; correct the name, or log in: {LOGIN}"
    if any(getattr(getattr(e, "response", None), "status_code", None) == 401 for e in chain):
        return f"the hub refuses the login that is used; log in again: {LOGIN}"
    if constants.HF_HUB_OFFLINE and _first(chain, hub.OfflineModeIsEnabled, hub.LocalEntryNotFoundError, ConnectionError):
        return f"HF_HUB_OFFLINE is set and not all of {name} is in the cache; run once without it, where the hub can be reached"
    transport = next((e for e in chain if _is_transport(e)), None)
    if transport is not None:
        message = " ".join(str(transport).split())[:SHOWN] or type(transport).__name__
        folder = Path(name).parent
        close_names = (
            difflib.get_close_matches(Path(name).name, [p.name for p in folder.iterdir()], 1) if folder.is_dir() else []
        )
        hint = f"if it is a path, did you mean {folder / close_names[0]}? Else " if close_names else ""
        return (
            f"the connection to {constants.ENDPOINT} failed ({message}); {hint}run the same command again, it keeps the files "
            "that are complete"
        )
    return None


def data_set_reason(error: BaseException, name: str, revision: str | None = None) -> str | None:
    """`hub_reason` of an error of `datasets`, which drops some causes. Then the hub is asked what it has against this login."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    if (reason := hub_reason(error, name, "dataset", revision)) is not None:
        return reason
    try:
        HfApi().dataset_info(name, revision=revision)
        HfApi().auth_check(name, repo_type="dataset")
    except HfHubHTTPError as refusal:
        return hub_reason(refusal, name, "dataset", revision)
    except Exception:  # no answer, or no name that the hub could have: the first error says more
        return None
    return None


def _is_transport(error: BaseException) -> bool:
    """Whether there was no whole answer."""
    from huggingface_hub import errors as hub

    return isinstance(error, ConnectionError) or (
        isinstance(error, hub.HTTPError) and not isinstance(error, hub.HfHubHTTPError)
    )


def logged_in() -> bool:
    """Whether there is a login to the hub."""
    from huggingface_hub import get_token

    return bool(get_token())


def without_token(text: str) -> str:
    """The text without the login, which a server's answer may repeat."""
    from huggingface_hub import get_token

    token = get_token()
    return text.replace(token, "***") if token else text


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, what caused it, and what was being handled when it was raised."""
    seen_ids: set[int] = set()
    waiting = [error]
    while waiting:
        cause = waiting.pop(0)
        if cause is not None and id(cause) not in seen_ids:
            seen_ids.add(id(cause))
            yield cause
            waiting += [cause.__cause__, cause.__context__]


def _first(chain: list[BaseException], *error_types: type[BaseException]) -> BaseException | None:
    return next((error for error in chain if isinstance(error, error_types)), None)
