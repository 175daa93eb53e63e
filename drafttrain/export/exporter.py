"""Write a checkpoint and its model card for serving stacks, check each directory, and move all into place at once."""

from __future__ import annotations

import glob
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

import yaml
from torch import Tensor

from drafttrain import __version__
from drafttrain.core.errors import UserError
from drafttrain.core.files import atomic_directory, list_files, remove_abandoned
from drafttrain.drafters.checkpoint import TEMPLATE, CheckpointMeta, template_of
from drafttrain.drafters.tuned_settings import tuned_proposal
from drafttrain.export.compressed import SAID, Compression, check_library, group_of
from drafttrain.export.drafter_adapter import about, adapter_of, merged_place, write_alone
from drafttrain.export.files import DTYPES, ExportSource, Files, write
from drafttrain.export.format import Format
from drafttrain.export.formats import gguf
from drafttrain.export.golden import Golden
from drafttrain.export.hub import Repository, is_repository
from drafttrain.export.layers import latent_fields, refuse_scaling
from drafttrain.export.opened import Opened
from drafttrain.export.parity import Parity, check, check_model, drafts_of, rounded, rounded_drafter, tau_change
from drafttrain.export.serve import STACKS, draft_lengths
from drafttrain.export.table import TABLE, format_of, load_it, loads, refuse_pictures, row_of, serving_command, stacks_for
from drafttrain.model.drafter import Drafter
from drafttrain.targets.load import LoadedTarget

TAGS = ["speculative-decoding", "drafttrain"]
FROZEN = (
    "It drafts tokens for this target and for no other. The target verifies every draft, so that its output does not change."
)
ADAPTED = (
    "The target was trained together with this drafter. The trained target is in the folder `target` next to it: serve that "
    "one. Its output differs from the original target's."
)
APART = (
    "The target was trained together with this drafter. The trained part is in the folder `target` next to it, as a peft "
    "adapter: merge it into the original target, and serve the result. Its output differs from the original target's."
)
MERGE = (
    "from peft import AutoPeftModelForCausalLM\n"
    "AutoPeftModelForCausalLM.from_pretrained({adapter!r}).merge_and_unload().save_pretrained({merged!r})"
)


@dataclass(frozen=True, slots=True)
class CardFigures:
    """The measured figures in the run's report.json; None for a figure that was not measured."""

    tau: float | None = None  # accepted length: tokens per decode step
    speedup: float | None = None  # speed relative to plain decoding
    policy: str | None = None
    proposal: str | None = None  # the chain or tree that was measured
    batch_size: int = 1  # with so many requests at a time
    chains: tuple[float, ...] = ()  # expected tau of a chain of one draft, of two and so on, on the same prompts
    device: str | None = None
    data: str | None = None  # path of the training data
    steps: int | None = None  # training steps

    @staticmethod
    def of(checkpoint: Path) -> CardFigures:
        """The figures of this checkpoint. All are None where the run has no report, or none of this checkpoint."""
        try:
            report = json.loads((checkpoint.resolve().parent.parent / "report.json").read_text(encoding="utf-8"))
            entry: dict[str, Any] = next((c for c in report["checkpoints"] if c["name"] == checkpoint.resolve().name), {})
            training = report["training"] or {}
            return CardFigures(
                entry.get("tau"),
                entry.get("speedup"),
                entry.get("policy"),
                entry.get("proposal"),
                entry.get("batch_size", 1),
                tuple(entry.get("expected_tau_by_length") or ()),
                report["environment"].get("device"),
                (training.get("data") or {}).get("path"),
                training.get("steps"),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return CardFigures()


def card(source: ExportSource, layout: str, place: str | Repository, parity: Parity, apart: bool = False) -> str:
    """README.md of an exported directory, the model card: target, training, measured acceptance, and the serving command.

    place: the final directory of the export, or the repository that it is uploaded to. apart: the files are an adapter of the
    drafter, and its command is that of the merged drafter.
    """
    meta, measured = source.opened.meta, CardFigures.of(source.opened.directory)
    base = {"base_model": source.target_name} if is_repository(source.target_name) else {}  # the hub takes no directories
    front_matter = yaml.safe_dump(base | {"tags": TAGS}, sort_keys=False)
    rows: dict[str, Any] = {
        "target": f"`{source.target_name}` ({source.target_architecture}, fingerprint `{meta.target.fingerprint[:12]}`)",
        "family": meta.family,
        "layout": f"{layout}, {source.dtype}",
        **_quantised(source, parity),
        "trained": _trained(source, measured),
        "measured": _measured(source, measured),
        **_served(source, measured),
        "parity": _parity(source, parity),
        "written by": f"drafttrain {__version__}",
    }
    if len(set((lengths := draft_lengths(source.opened)).values())) > 1:
        chosen = ", ".join(f"{length or 'none'} from batch size {size}" for size, length in lengths.items())
        rows["draft length"] = f"{chosen}, as `drafttrain tune` chose"
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    stack = STACKS[source.stack]
    language = "python" if stack.python else "bash"
    loads_by_name = stack.by_name and source.merged is None and not apart
    needs_download = isinstance(place, Repository) and not loads_by_name
    directory = place if isinstance(place, str) else place.folder if needs_download else place.name
    sections = [
        f"---\n{front_matter}---",
        f"# {meta.family} drafter for {source.target_name}",
        _about_target(source),
        f"| | |\n|---|---|\n{table}",
        *(
            [f"The command below reads the files from a directory. Download them first: `{place.download}`."]
            if isinstance(place, Repository) and needs_download
            else []
        ),
        *([about(directory)] if apart else []),
        f"```{language}\n{_command(source, merged_place(directory) if apart else directory, place)}\n```",
        *_remarks(source, place),
    ]
    note = row_of(meta.family, source.stack).note
    return "\n\n".join(sections + ([note] if note else [])) + "\n"


def _about_target(source: ExportSource) -> str:
    if source.adapter is None:
        return ADAPTED if source.merged else FROZEN
    return f"{APART}\n\n```python\n{MERGE.format(adapter=source.adapter, merged=source.merged)}\n```"


def _trained(source: ExportSource, measured: CardFigures) -> str:
    meta = source.opened.meta
    if meta.imported is not None:
        return f"by other people, imported from `{meta.imported['from']}` ({meta.imported['layout']}, {meta.imported['dtype']})"
    return f"{meta.step} steps" + (f" on `{measured.data}`" if measured.data else "")


def _measured(source: ExportSource, measured: CardFigures) -> str:
    if measured.tau is None:
        return "no: the training run has no report"
    speed = "" if measured.speedup is None else f", {measured.speedup:.2f}x the speed of plain decoding"
    device = "" if measured.device is None else f" on {measured.device}"
    how = ", ".join(filter(None, (measured.proposal, f"policy {measured.policy}")))
    text = f"tau {measured.tau:.2f} tokens per decode step ({how}){speed}, in drafttrain's decoder{device}"
    if (tuned := tuned_proposal(source.opened.directory, measured.batch_size)) in (None, measured.proposal):
        return text
    return f"{text}; not measured since `drafttrain tune` chose: {tuned}"


def _served(source: ExportSource, measured: CardFigures) -> dict[str, str]:
    """A row on the chain that the stack drafts, where its tau is known and the drafter was measured otherwise."""
    length = next(iter(draft_lengths(source.opened).values()))
    if not 0 < length <= len(measured.chains) or measured.proposal == f"draft length {length}" or source.stack == "official":
        return {}
    return {"served": f"a chain of {length} drafts, expected tau {measured.chains[length - 1]:.2f} on the same prompts"}


def _command(source: ExportSource, directory: str, place: str | Repository) -> str:
    """The command; for use on this machine with whole paths, and with the run's chat template where the stack takes one."""
    if not isinstance(place, str):
        return serving_command(source, directory)
    target, flag = source.target_name, STACKS[source.stack].template
    is_path = source.merged is not None or Path(target).is_dir()
    command = serving_command(source, directory, str(Path(target).absolute()) if is_path else None)
    if flag is None or template_of(source.opened.directory) is None:
        return command
    return f"{command} {flag} {quote(f'{place}/{TEMPLATE}')}"


def _remarks(source: ExportSource, place: str | Repository) -> list[str]:
    remarks = ["Paths are those of the machine that wrote these files."] if isinstance(place, str) else []
    if template_of(source.opened.directory) is not None:
        remarks.append(f"The drafter was trained with the chat template in `{TEMPLATE}`: the server must use it too.")
    return [" ".join(remarks)] if remarks else []


def _quantised(source: ExportSource, parity: Parity) -> dict[str, str]:
    """A row on quantised weights."""
    if source.quantize is None:
        return {}
    change = "" if parity.tau is None else f"; {tau_text(parity.tau, source.quantize)}"
    return {"quantised": f"{source.quantize}: {SAID[source.quantize]}{change}"}


def tau_text(tau: tuple[float, float], kind: str) -> str:
    """What quantisation does to the acceptance."""
    return f"expected tau {tau[0]:.2f} -> {tau[1]:.2f} ({kind})"


def _parity(source: ExportSource, parity: Parity) -> str:
    text = f"these files give the same {parity.drafts} golden drafts and logits as the checkpoint"
    if source.dtype == "float32" and source.quantize is None:
        return text
    how = f"rounded to {source.dtype}" if source.quantize is None else f"quantised to {source.quantize}"
    return f"{text} with weights {how}; the rounding changes {parity.changed} of the drafted tokens"


RECORD, TARGET, CARD = "drafttrain.json", "target", "README.md"
GGUF = "llamacpp"  # the stack that reads targets as GGUF files


@dataclass(frozen=True, slots=True)
class ExportSettings:
    """The settings of an export."""

    stacks: list[str]
    out: Path  # the directory to make; with several stacks each gets a folder in it
    dtype: str  # of the exported weights
    several: bool  # format=all
    overwrite: bool = False
    max_shard_size: str = "5GB"
    with_target: bool = False  # also write the target, for the stack that needs it in its own form
    repository: Repository | None = None  # the hub repository that it is uploaded to later
    adapter: bool = False  # export low-rank matrices as an adapter and do not merge them
    quantize: str | None = None  # fp8, int8 or int4: quantise the weights of the drafter's layers


@dataclass(frozen=True, slots=True)
class Exported:
    """The result for each stack."""

    written: dict[str, Parity]  # parity of the written files
    refused: dict[str, str]  # the reason why nothing was written


def check_wanted(wanted: ExportSettings) -> None:
    """Raise UserError for settings that are wrong with every checkpoint."""
    if wanted.with_target and GGUF not in wanted.stacks:
        raise UserError(f"with_target=true writes the target as GGUF, which only format={GGUF} reads; leave it out")
    if wanted.quantize is not None:
        if wanted.adapter:
            raise UserError(f"quantize is {wanted.quantize}, but with adapter=true no weights are merged; leave one out")
        check_library(f"quantize={wanted.quantize}")
    if wanted.repository is not None:
        if wanted.several:
            raise UserError(
                "push_to_hub is given with format=all; stacks load a repository from its top, so choose one of them"
            )
        wanted.repository.check()
    out = wanted.out
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not wanted.overwrite:
        raise UserError(f"out is {str(out)!r}, which exists; name another directory, or add overwrite=true")
    if not (out / RECORD).is_file():
        raise UserError(f"out is {str(out)!r}, which is no export (it has no {RECORD}), so it is kept; name another directory")


def refusals(opened: Opened, wanted: ExportSettings) -> dict[str, str]:
    """The stacks that cannot load this very drafter, with the reasons. Raises UserError where none of them can."""
    reasons = {stack: _refusal(opened, stack, wanted) for stack in wanted.stacks}
    if wanted.with_target and reasons.get(GGUF, "refused") is None:
        target_reason = gguf.refuse_target(ExportSource(opened, GGUF, wanted.dtype))
        reasons[GGUF] = (
            None if target_reason is None else f"the target cannot be written as GGUF: {target_reason}; leave out with_target"
        )
    refused = {stack: reason for stack, reason in reasons.items() if reason is not None}
    if len(refused) == len(reasons):
        raise UserError(_nowhere(opened, wanted, refused))
    return refused


def planned(opened: Opened, dtype: str, quantize: str | None = None) -> tuple[list[str], dict[str, str]]:
    """(the stacks that can load drafters of this form, why other stacks that load the family cannot)."""
    stacks = loads(opened.meta.family)
    settings = ExportSettings(stacks, Path(), dtype, several=True, quantize=quantize)
    reasons = {stack: _refusal(opened, stack, settings) for stack in stacks}
    refused = {stack: reason for stack, reason in reasons.items() if reason is not None}
    return [stack for stack in stacks if stack not in refused], refused


def _apart(checkpoint: Opened, settings: ExportSettings) -> bool:
    """Whether the drafter's own low-rank matrices are exported. For a trained target, adapter=true concerns only the target."""
    if not settings.adapter or checkpoint.meta.adapter is not None:
        return False
    if checkpoint.meta.lora is not None:
        return True
    from peft.tuners.lora import LoraLayer  # takes seconds, and few runs need it

    if not any(isinstance(module, LoraLayer) for module in checkpoint.drafter.modules()):
        raise UserError(f"adapter=true, but this {checkpoint.meta.family} drafter has no low-rank adapter; leave it out")
    return True


def _to(checkpoint: Opened, stack: str, settings: ExportSettings) -> Format | None:
    """The format for this stack. None: the stack takes no adapter."""
    merged_format = format_of(checkpoint.meta.family, stack)
    if not _apart(checkpoint, settings):
        return merged_format
    return merged_format.adapter if checkpoint.meta.lora is None else adapter_of(merged_format)


def _refusal(checkpoint: Opened, stack: str, settings: ExportSettings) -> str | None:
    export_format = _to(checkpoint, stack, settings)
    if export_format is None:
        return "it takes no adapter as a drafter; leave adapter out to export it merged"
    source = ExportSource(checkpoint, stack, settings.dtype)
    scaling_reason = None if STACKS[stack].any_scaling else refuse_scaling(source)
    quantised_reason = None if settings.quantize is None else _refuse_quantised(checkpoint, stack, settings.quantize)
    layers_reason = scaling_reason or _refuse_sinks(source)
    return refuse_pictures(source) or layers_reason or export_format.refuse(source) or quantised_reason


def _refuse_sinks(source: ExportSource) -> str | None:
    """Why a stack cannot load a drafter whose layers have attention sinks; None where it can."""
    if not source.sinks or row_of(source.opened.meta.family, source.stack).sinks:
        return None
    return (
        f"its layers have attention sinks, which {source.stack} is not known to read for this family; train with "
        "drafter.layer.attention_sinks=false"
    )


def _refuse_quantised(checkpoint: Opened, stack: str, kind: str) -> str | None:
    """Why a stack does not load this drafter with quantised weights; None where it does."""
    if not row_of(checkpoint.meta.family, stack).quantised:
        return f"{stack} is not known to read quantised weights of this family; leave quantize out"
    if latent_fields(checkpoint.shape):
        return f"{stack} is not known to read quantised weights of latent attention; leave quantize out"
    if kind == "int4" and group_of(checkpoint.tensors) is None:
        return "the inputs of its linear maps do not divide into groups of 128, 64 or 32; choose quantize=int8 or fp8"
    return None


def export(
    opened: Opened,
    golden: Golden,
    wanted: ExportSettings,
    prompts: Sequence[Sequence[int]] = (),
    outputs: Sequence[Sequence[int]] = (),
) -> Exported:
    """Write and check the directories of all stacks that can load the drafter.

    prompts, outputs: of the target, on which the expected tau before and after quantisation is found.

    Raises UserError for a drafter that no stack can load, for weights that the dtype cannot hold and for a full disk, and
    ParityError where the written files draft something else. Nothing is left in these cases.
    """
    refused, family = refusals(opened, wanted), opened.meta.family
    supported = [stack for stack in wanted.stacks if stack not in refused]
    compression = None if wanted.quantize is None else Compression.of(wanted.quantize, opened.tensors)
    parities, tau = dict[str, Parity](), None
    if compression is None:
        expected = rounded(opened, golden, wanted.dtype)
    else:
        quantised = rounded_drafter(opened, wanted.dtype, compression)
        expected, tau = drafts_of(quantised, opened, golden), tau_change(opened, quantised, prompts, outputs)
    remove_abandoned(wanted.out.parent, f"{glob.escape(wanted.out.name)}.tmp-*")
    with atomic_directory(wanted.out, f"free space under {wanted.out.parent}, or name another out=") as staging_dir:
        merged_path, adapter_path = (None, None) if opened.meta.adapter is None else _write_target(staging_dir, opened, wanted)
        for stack in supported:
            folder, final_dir = (staging_dir / stack, wanted.out / stack) if wanted.several else (staging_dir, wanted.out)
            folder.mkdir(exist_ok=True)
            source, export_format = (
                ExportSource(opened, stack, wanted.dtype, merged_path, adapter_path, str(final_dir), wanted.quantize),
                _to(opened, stack, wanted),
            )
            assert export_format is not None, "refused above"
            files = export_format.write(source)
            if compression is not None:
                files = compression.files(files, DTYPES[wanted.dtype])
            write(folder, files, source, wanted.max_shard_size)
            parities[stack] = replace(check(folder, export_format, files, source, golden, expected), tau=tau)
            if wanted.with_target and stack == GGUF:
                _write_gguf_target(folder, source, wanted)
            _describe(folder, wanted.repository or str(final_dir.absolute()), export_format, source, parities[stack])
        if wanted.several:
            refusal_reasons = {stack: row for stack, row in TABLE[family].items() if isinstance(row, str)} | refused
            _record(staging_dir, {"version": __version__, "written": supported, "refused": refusal_reasons})
            return Exported(parities, refusal_reasons)
    return Exported(parities, {})


def _write_target(staging_dir: Path, checkpoint: Opened, settings: ExportSettings) -> tuple[str, str | None]:
    """Write the target that was trained with the drafter: merged, in its own dtype, or as a peft adapter, in float32.

    Returns the final place of the merged target, and that of the adapter if it is to be merged from there.
    """
    root = str(settings.out) if settings.repository is None else settings.repository.folder
    if settings.adapter and checkpoint.meta.adapter is not None:
        spec = checkpoint.meta.adapter
        write_alone(staging_dir / TARGET, checkpoint.matrices, spec["rank"], spec["alpha"], checkpoint.loaded.path)
        list_files(staging_dir / TARGET)
        return f"{root}/{TARGET}-merged", f"{root}/{TARGET}"
    model: Any = checkpoint.loaded.target.model
    model.save_pretrained(staging_dir / TARGET, max_shard_size=settings.max_shard_size)
    checkpoint.loaded.tokenizer.save_pretrained(staging_dir / TARGET)
    check_model(staging_dir / TARGET, model)
    list_files(staging_dir / TARGET)
    return f"{root}/{TARGET}", None


def _write_gguf_target(folder: Path, source: ExportSource, settings: ExportSettings) -> None:
    files = gguf.target_files(source)
    write(folder, files, source, settings.max_shard_size)
    gguf.check_target(folder, source)


def _describe(folder: Path, destination: str | Repository, export_format: Format, source: ExportSource, parity: Parity) -> None:
    (folder / CARD).write_text(card(source, export_format.name, destination, parity, export_format.apart), encoding="utf-8")
    if (template := template_of(source.opened.directory)) is not None:
        shutil.copyfile(template, folder / TEMPLATE)
    record: dict[str, Any] = {
        "version": __version__,
        "stack": source.stack,
        "layout": export_format.name,
        "dtype": source.dtype,
    }
    if source.quantize is not None:
        record |= {"quantize": source.quantize, "expected_tau": parity.tau}  # before and after
    meta = source.opened.meta  # an import reads options and decode settings here that the layout cannot hold
    record |= {"family": meta.family, "checkpoint": meta.sha256, "options": meta.options, "decode": meta.decode}
    _record(folder, record)


def _record(folder: Path, record: dict[str, Any]) -> None:
    """Mark a directory as one that `overwrite` may replace, and list the checksums of all files but the model card."""
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    list_files(folder, without=(CARD,))


def _nowhere(checkpoint: Opened, settings: ExportSettings, refused: dict[str, str]) -> str:
    family, stack = checkpoint.meta.family, settings.stacks[0]
    if settings.several:
        return f"no stack loads this {family} drafter: " + "; ".join(f"{name}: {reason}" for name, reason in refused.items())
    other_stacks = [candidate for candidate in loads(family) if candidate != stack]
    alternatives = [candidate for candidate in other_stacks if _refusal(checkpoint, candidate, settings) is None]
    loaders = f"{load_it(alternatives)} unchanged" if alternatives else "no other stack loads it unchanged"
    return f"this {family} drafter cannot be exported to {stack}: {refused[stack]}; {loaders}"


class CurrentDrafter:
    """The weights of a drafter in memory, in the format of one stack. No checkpoint is written, and nothing is compared.

    Raises UserError for a stack that does not load this drafter, and for a dtype that is unknown.
    """

    def __init__(self, drafter: Drafter, meta: CheckpointMeta, loaded: LoadedTarget, stack: str, dtype: str) -> None:
        (stack,) = stacks_for(meta.family, stack) if stack != "all" else ("all",)
        if stack == "all":
            raise UserError("layout is 'all'; name one serving stack")
        if dtype not in DTYPES:
            raise UserError(f"dtype is {dtype!r}; choose one of {', '.join(DTYPES)}")
        self.source = ExportSource(Opened.in_memory(meta, drafter, loaded), stack, dtype)
        export_format = format_of(meta.family, stack)
        if (reason := export_format.refuse(self.source)) is not None:
            raise UserError(f"this {meta.family} drafter cannot be given to {stack}: {reason}")
        self.files: Files = export_format.write(self.source)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors as in the files of an export, on the drafter's device. They may share memory with the drafter."""
        for name, tensor in self.files.tensors.items():
            keeps_dtype = name in self.files.as_is or not tensor.is_floating_point()
            yield name, tensor.detach() if keeps_dtype else tensor.detach().to(DTYPES[self.source.dtype])

    def write(self, directory: Path) -> None:
        """Write the files of an export, without a model card, into an existing directory."""
        write(directory, self.files, self.source, "5GB")
