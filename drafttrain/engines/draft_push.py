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
class PushedDrafter:
    """A drafter at one optimiser step."""

    step: int
    weights: Callable[[], Iterator[tuple[str, Tensor]]]  # in the names of the receiver's layout
    write: Callable[[Path], None]  # writes an export's files into an existing directory


class DraftReceiver(Protocol):
    """Something that takes drafters. Requests in flight may go on: an old draft costs acceptance only."""

    stack: str  # the export layout that it reads

    def receive(self, draft: PushedDrafter) -> None: ...


class DraftPush:
    """An extension of vLLM's workers: `LLM(worker_extension_cls="drafttrain.engines.draft_push.DraftPush", ...)`.

    Its layer-by-layer reload gives packed weights their first shapes again; a plain `load_weights` fails on them.

    vLLM lets a draft whose head or embedding equals the target's use the target's module. New weights would change the target,
    so they are refused.
    """

    def load_draft(self, path: str) -> list[str]:
        """Load the draft model's weights from a safetensors file, unless some are of modules that the draft shares with the
        target and differ from the target's: then nothing is loaded, and their names are returned."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        worker: Any = self
        runner, config = worker.model_runner, worker.vllm_config
        model = runner.get_draft_model() if hasattr(runner, "get_draft_model") else runner.drafter.model
        weights, shared = load_file(path), _shared(model, runner.get_model())
        identical = {
            name for name, x in weights.items() if (module := shared.get(_module(name))) is not None and _equal(module, x)
        }
        if conflicting := [name for name in weights if _module(name) in shared and name not in identical]:
            return conflicting
        weights = {name: x for name, x in weights.items() if name not in identical}
        with set_current_vllm_config(config):
            initialize_layerwise_reload(model)
            model.load_weights(weights.items())
            finalize_layerwise_reload(model, config.speculative_config.draft_model_config)
        return []


def _shared(draft: Any, target: Any) -> dict[str, Any]:
    """The modules with weights that both have, by the last part of their names in the draft."""
    of_target = {id(module) for module in target.modules()}
    shared_modules = {name.rpartition(".")[2]: module for name, module in draft.named_modules() if id(module) in of_target}
    return {name: module for name, module in shared_modules.items() if getattr(module, "weight", None) is not None}


def _module(name: str) -> str:
    """The last part of the name of a weight's module: `model.embed_tokens.weight` gives embed_tokens."""
    return name.rpartition(".")[0].rpartition(".")[2]


def _equal(module: Any, weight: Tensor) -> bool:
    """False also where the engine has packed the module's weight."""
    module_weight: Tensor = module.weight
    return module_weight.shape == weight.shape and bool((module_weight.cpu() == weight.to(module_weight.dtype)).all())


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

    def receive(self, draft: PushedDrafter) -> None:
        with tempfile.TemporaryDirectory(prefix="drafttrain-", dir=self.folder) as folder:
            file = Path(folder) / "draft.safetensors"
            save_file({name: tensor.cpu().contiguous().clone() for name, tensor in draft.weights()}, file)
            conflicting = self.llm.collective_rpc("load_draft", args=(str(file),))
        if names := sorted({name for worker_names in conflicting or () for name in worker_names or ()}):
            raise UserError(
                f"vLLM uses the target's own {', '.join(names)} for the draft, because the draft that it started with had the "
                "same; start it with a draft that has been trained for a step"
            )


class ReloadedDirectory:
    """Writes each draft as an export to `<folder>/draft-<step>` and calls `reload` with that directory.

    For engines that read a draft from disk again, by a request of theirs or by a restart. keep: directories that stay.
    """

    def __init__(self, folder: str | Path, reload: Callable[[Path], object], stack: str = "vllm", keep: int = 2) -> None:
        self.folder, self.reload, self.stack, self.keep = Path(folder), reload, stack, max(1, keep)

    def receive(self, draft: PushedDrafter) -> None:
        new_dir = self.folder / f"draft-{draft.step:07d}"
        with atomic_directory(new_dir) as staging_dir:
            draft.write(staging_dir)
        self.reload(new_dir)
        # by time: the steps of a loop that was started again are smaller than those of earlier drafts
        older = [
            path for path in self.folder.glob("draft-*") if path != new_dir and path.name.removeprefix("draft-").isdecimal()
        ]
        older.sort(key=lambda path: path.stat().st_mtime)
        for stale in older[: max(0, len(older) + 1 - self.keep)]:
            shutil.rmtree(stale, ignore_errors=True)


def receiver_of(engine: Any) -> DraftReceiver:
    """The engine as a receiver. Raises UserError for something that takes no drafts."""
    if callable(getattr(engine, "receive", None)) and hasattr(engine, "stack"):
        receiver: DraftReceiver = engine
        return receiver
    if callable(getattr(engine, "collective_rpc", None)):
        return VLLMEngine(engine)
    raise UserError(
        f"push got a {type(engine).__name__}; give a vllm.LLM with worker_extension_cls={EXTENSION!r}, or "
        "ReloadedDirectory(folder, reload)"
    )
