"""Gives a serving engine the weights of a drafter that is still being trained.

`DraftPush` runs inside vLLM's workers, where nothing else of this package is needed: it imports torch, safetensors and vLLM.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from safetensors.torch import load_file, save_file
from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.core.files import atomic_directory

EXTENSION = "drafttrain.engines.draft_push.DraftPush"
MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Draft:
    """A drafter at one optimiser step."""

    step: int
    weights: Callable[[], Iterator[tuple[str, Tensor]]]  # in the names of the receiver's layout
    write: Callable[[Path], None]  # writes an export's files into an existing directory


class DraftReceiver(Protocol):
    """Something that takes drafters. Requests in flight may go on: an old draft costs acceptance only."""

    stack: str  # the export layout that it reads

    def receive(self, draft: Draft) -> None: ...


class DraftPush:
    """An extension of vLLM's workers: `LLM(worker_extension_cls="drafttrain.engines.draft_push.DraftPush", ...)`.

    Its layer-by-layer reload gives packed weights their first shapes again; a plain `load_weights` fails on them.
    """

    def load_draft(self, path: str) -> int:
        """Load the draft model's weights from a safetensors file; how many tensors there were."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        worker: Any = self
        runner, config = worker.model_runner, worker.vllm_config
        model = runner.get_draft_model() if hasattr(runner, "get_draft_model") else runner.drafter.model
        weights = load_file(path)
        with set_current_vllm_config(config):
            initialize_layerwise_reload(model)
            model.load_weights(weights.items())
            finalize_layerwise_reload(model, config.speculative_config.draft_model_config)
        return len(weights)


class VLLMEngine:
    """A live `vllm.LLM` that was made with `worker_extension_cls=EXTENSION`. Weights go through a file in memory.

    folder: where the file is written for a moment; every worker must see it. None: /dev/shm, or the folder of temporary files.
    """

    stack = "vllm"

    def __init__(self, llm: Any, folder: Path | None = None) -> None:
        self.llm, self.folder = llm, folder or (MEMORY if MEMORY.is_dir() else None)
        config = getattr(getattr(llm, "llm_engine", None), "vllm_config", None)
        extension = getattr(getattr(config, "parallel_config", None), "worker_extension_cls", EXTENSION)
        if extension != EXTENSION:
            raise UserError(f"the LLM has worker_extension_cls={extension!r}; make it with worker_extension_cls={EXTENSION!r}")

    def receive(self, draft: Draft) -> None:
        with tempfile.TemporaryDirectory(prefix="drafttrain-", dir=self.folder) as folder:
            file = Path(folder) / "draft.safetensors"
            save_file({name: tensor.cpu().contiguous().clone() for name, tensor in draft.weights()}, file)
            self.llm.collective_rpc("load_draft", args=(str(file),))


class ReloadedDirectory:
    """Writes each draft as an export to `<folder>/draft-<step>` and calls `reload` with that directory.

    For engines that read a draft from disk again, by a request of theirs or by a restart. keep: directories that stay.
    """

    def __init__(self, folder: str | Path, reload: Callable[[Path], object], stack: str = "vllm", keep: int = 2) -> None:
        self.folder, self.reload, self.stack, self.keep = Path(folder), reload, stack, max(1, keep)

    def receive(self, draft: Draft) -> None:
        place = self.folder / f"draft-{draft.step:07d}"
        with atomic_directory(place) as aside:
            draft.write(aside)
        self.reload(place)
        for old in sorted(self.folder.glob("draft-*"))[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)


def receiver_of(engine: Any) -> DraftReceiver:
    """The engine as a receiver. Raises UserError for something that takes no drafts."""
    if callable(getattr(engine, "receive", None)) and hasattr(engine, "stack"):
        found: DraftReceiver = engine
        return found
    if callable(getattr(engine, "collective_rpc", None)):
        return VLLMEngine(engine)
    raise UserError(
        f"push got a {type(engine).__name__}; give a vllm.LLM with worker_extension_cls={EXTENSION!r}, or "
        "ReloadedDirectory(folder, reload)"
    )
