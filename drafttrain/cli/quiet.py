"""Keep the libraries' chatter off the console, and keep W&B from asking anything."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path

SETTINGS = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",
    "KINETO_LOG_LEVEL": "99",  # of the profiler
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "WANDB_SILENT": "true",
}
ACCELERATORS = ("nvidia0", "nvidiactl", "dxg", "kfd", "accel0", "davinci0")  # device files of CUDA, WSL, ROCm, Habana, Ascend
NOISY = ("torch", "deepspeed", "transformers", "datasets", "hydra", "wandb", "multiprocessing", "_distutils_hack")


def quiet() -> None:
    """Set what the libraries read when they are imported; a variable that the user has set stays as it is."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    if not any(Path("/dev", name).exists() for name in ACCELERATORS):
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed warns when it has to find that out
    logging.getLogger("DeepSpeed").addFilter(_errors_only)  # it sets its own level at import, but keeps filters
    for library in NOISY:
        warnings.filterwarnings("ignore", module=rf"{library}(\.|$)")


def _errors_only(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
