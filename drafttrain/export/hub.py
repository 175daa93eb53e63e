"""Upload an export to the Hugging Face hub. huggingface_hub handles the login; this code neither reads nor stores it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HFValidationError, HTTPError
from huggingface_hub.utils import validate_repo_id

from drafttrain import __version__
from drafttrain.core.errors import UserError
from drafttrain.core.files import check_listed

SHOWN = 200  # characters of the hub's answer


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository of the hub."""

    name: str
    private: bool  # for a new repository; an existing one keeps its setting

    def check(self) -> None:
        """Raise UserError for a bad name or a missing login, before anything is computed."""
        try:
            validate_repo_id(self.name)
        except HFValidationError as error:
            raise UserError(f"push_to_hub is {self.name!r}; name a repository as OWNER/NAME") from error
        if self.name.count("/") != 1:
            raise UserError(f"push_to_hub is {self.name!r}; name a repository as OWNER/NAME")
        if constants.HF_HUB_OFFLINE:
            raise UserError("push_to_hub uploads, and HF_HUB_OFFLINE forbids it; unset one of them")
        if not get_token():
            raise UserError("push_to_hub needs a login to the hub; run hf auth login, or set HF_TOKEN")

    @property
    def folder(self) -> str:
        """The folder that `download` makes."""
        return self.name.rpartition("/")[2]

    @property
    def download(self) -> str:
        """The command that downloads the repository."""
        return f"hf download {self.name} --local-dir {self.folder}"


def push(directory: Path, repository: Repository, message: str) -> str:
    """Upload the directory in one commit, and return its address.

    Raises UserError for a file that differs from the checksums, before anything is uploaded, and for a failed upload. The
    directory stays in both cases.
    """
    check_listed(directory, "export again")
    api = HfApi(library_name="drafttrain", library_version=__version__)
    try:
        api.create_repo(repository.name, private=repository.private, exist_ok=True)
        commit = api.upload_folder(repo_id=repository.name, folder_path=directory, commit_message=message)
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        retry_command = f"hf upload {repository.name} {directory} ." + (" --private" if repository.private else "")
        failure = f"its upload to {repository.name} failed ({_reason(error)})"
        raise UserError(f"{directory} is complete and stays, but {failure}; repeat it: {retry_command}") from error
    return str(commit.commit_url)


def is_repository(name: str) -> bool:
    """Whether a target's name is a hub id and not a directory here."""
    return re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) is not None and not Path(name).exists()


def _reason(error: Exception) -> str:
    """The error in one line, without the login token, which an answer may repeat."""
    text, token = " ".join(str(error).split()) or type(error).__name__, get_token()
    return (text.replace(token, "***") if token else text)[:SHOWN]
