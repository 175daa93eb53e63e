"""Failures of the hub, as the libraries wrap them, in one clause."""

from __future__ import annotations

from typing import Any

import pytest
from huggingface_hub import constants, errors

from drafttrain.core import errors as hub_errors
from drafttrain.core.errors import hub_reason, without_token


class Answer:
    """A response with a status."""

    def __init__(self, status: int) -> None:
        self.status_code, self.headers, self.request = status, {}, None


def wrapped(inner: Exception, by_cause: bool) -> Exception:
    """As transformers (from) and datasets (while handling) do."""
    try:
        try:
            raise inner
        except Exception as error:
            if by_cause:
                raise OSError("There was a specific connection error") from error
            raise ValueError("no data set")  # noqa: B904
    except Exception as outer:
        return outer


def refusal(kind: type[errors.HfHubHTTPError], status: int) -> Exception:
    response: Any = Answer(status)
    return kind("refused", response=response)


GATED = "a/b is gated; accept its terms or ask for access at https://huggingface.co/a/b, and log in"
ANSWERS = [  # kind, status, whether there is a login, what is said
    (errors.GatedRepoError, 401, False, GATED),
    (errors.GatedRepoError, 403, True, "https://huggingface.co/a/b, with the login that is used here"),
    (errors.RepositoryNotFoundError, 401, False, "the hub has no model a/b, or it is private and no login is given"),
    (errors.RepositoryNotFoundError, 401, True, "or it is private and the login that is used may not read it"),
    (errors.RevisionNotFoundError, 404, False, "a/b has no revision 'v9'; name a branch"),
    (errors.HfHubHTTPError, 401, True, "the hub refuses the login that is used"),
    (errors.HfHubHTTPError, 500, False, None),
]


def test_hub_reason_maps_http_error_to_cause_and_fix(monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests) -> None:
    for kind, status, login, says in ANSWERS:
        with subtests.test(kind=kind, status=status, login=login):
            monkeypatch.setattr(hub_errors, "logged_in", lambda login=login: login)
            found = hub_reason(wrapped(refusal(kind, status), True), "a/b", revision="v9")
            assert found is None if says is None else found is not None and says in found
    found = hub_reason(wrapped(refusal(errors.GatedRepoError, 401), False), "a/b")
    assert found is not None and GATED in found


def test_hub_reason_connection_failure_or_offline_cache_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    found = hub_reason(wrapped(errors.HTTPError("cut\nin the middle"), True), "a/b")
    assert found is not None and f"the connection to {constants.ENDPOINT} failed (cut in the middle); run the same" in found
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    found = hub_reason(wrapped(errors.LocalEntryNotFoundError("not there"), True), "a/b")
    assert found is not None and found.startswith("HF_HUB_OFFLINE is set and not all of a/b is in the cache")
    assert hub_reason(ValueError("another"), "a/b") is None


def test_without_token_replaces_hub_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert without_token("hf_secret may not") == "*** may not"
