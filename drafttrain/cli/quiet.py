"""Suppresses the libraries' console output, and W&B's questions, and gives them a home."""

from __future__ import annotations

import codecs
import getpass
import io
import logging
import os
import sys
import warnings
from pathlib import Path

from drafttrain.core.files import temporary_home, writable

SETTINGS = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",
    "KINETO_LOG_LEVEL": "99",  # the profiler
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "WANDB_SILENT": "true",
}
DRAWN = {
    "█": "#",
    "▏": "|",
    "│": "|",
    "–": "-",
    "—": "-",
    "─": "-",
    "━": "-",
    "╸": "-",
    "╺": "-",
    "…": "...",
    "×": "x",
    "±": "+-",
}
ACCELERATORS = ("nvidia0", "nvidiactl", "dxg", "kfd", "accel0", "davinci0")  # device files of CUDA, WSL, ROCm, Habana, Ascend
NOISY = ("torch", "deepspeed", "transformers", "datasets", "hydra", "wandb", "multiprocessing", "_distutils_hack")


def quiet() -> None:
    """Set the environment variables that the libraries read at import. Variables that the user has set stay."""
    settle_home()
    settle_streams()
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    if not any(Path("/dev", name).exists() for name in ACCELERATORS):
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed warns that it found no accelerator
    logging.getLogger("DeepSpeed").addFilter(_errors_only)  # DeepSpeed resets its level at import, but keeps filters
    for library in NOISY:
        warnings.filterwarnings("ignore", module=rf"{library}(\.|$)")


def settle_streams() -> None:
    """Let text of any kind be printed where the terminal or the pipe is not UTF-8, and be read where it is ASCII."""
    codecs.register_error("drafttrain", _plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="drafttrain")
    if isinstance(sys.stdin, io.TextIOWrapper) and codecs.lookup(sys.stdin.encoding).name == "ascii":
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")


def _plain(error: UnicodeError) -> tuple[str, int]:
    """Characters that the stream's encoding lacks: drawn ones as similar ones of ASCII, others as escapes."""
    assert isinstance(error, UnicodeEncodeError)
    found = error.object[error.start : error.end]
    return "".join(DRAWN.get(one) or one.encode("ascii", "backslashreplace").decode() for one in found), error.end


def settle_home() -> None:
    """Give the libraries what they ask of a user who may have no account, no home or no folder to write to, as in containers.

    A home that exists stays: models and tokens may be in it.
    """
    try:
        getpass.getuser()
    except (KeyError, OSError, ImportError):  # torch names folders by it
        os.environ["USER"] = str(os.getuid())
    if not os.environ.get("HOME"):
        os.environ.pop("HOME", None)  # an empty one would be the working directory
    try:
        home = Path.home()
    except RuntimeError:
        os.environ["HOME"] = str(temporary_home())
        return
    if not writable(home / ".triton"):
        os.environ.setdefault("TRITON_CACHE_DIR", str(temporary_home() / "triton"))
    if not writable(home / ".cache") and not (home / ".cache").exists():
        os.environ.setdefault("XDG_CACHE_HOME", str(temporary_home()))


def _errors_only(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
