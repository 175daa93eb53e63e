"""The kinds of faults by name, and the imports that they need before the first fork."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules

from tests.faults.campaign import Kind
from tests.faults.data import Data
from tests.faults.files import Files
from tests.faults.hostile import Hostile
from tests.faults.kill import Kill
from tests.faults.storm import Storm

KINDS: dict[str, Callable[[], Kind]] = {"kill": Kill, "files": Files, "data": Data, "hostile": Hostile, "storm": Storm}


def load_all() -> None:
    """Import everything that the commands import, once."""
    import torch

    import drafttrain.commands

    torch.set_num_threads(1)
    from drafttrain.cli.quiet import quiet

    quiet()
    for module in iter_modules(drafttrain.commands.__path__):
        import_module(f"drafttrain.commands.{module.name}")
    for name in (
        "drafttrain.cli.main", "drafttrain.cli.config", "drafttrain.targets.load", "drafttrain.export.table",
        "drafttrain.train.trainer",
        "transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto", "deepspeed", "datasets",
        "pyarrow.parquet", "pyarrow.csv", "pyarrow.ipc", "matplotlib.pyplot", "safetensors.torch", "hydra", "peft",
    ):  # fmt: skip
        import_module(name)
