"""`python -m tests.engines.install`: the virtual environments of all engines that are not there yet, in .venv-engines.

An engine that cannot be installed gets a file `failed` with the reason, which its tests show as they skip.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress

from drafttrain.engines.process import ENGINES, VENVS

# packages that only tests need; without them a test skips
MORE = {"vllm": ("hs-connectors==0.9.0", "mooncake-transfer-engine-non-cuda==0.3.13.post1")}


def main() -> None:
    for name, engine in ENGINES.items():
        folder = VENVS / name
        if engine.package == "transformers" or (folder / "installed").is_file():
            continue
        print(f"{engine.label}: {', '.join(engine.needs)}, some minutes", flush=True)
        try:
            install(name)
        except subprocess.CalledProcessError as error:
            lines = [line for line in (error.stderr or "").splitlines() if line.strip()] or ["it said nothing"]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "failed").write_text(f"{engine.label} could not be installed: {lines[-1]}", encoding="utf-8")
            print(lines[-1], file=sys.stderr)


def install(name: str) -> None:
    engine, folder = ENGINES[name], VENVS / name
    run([sys.executable, "-m", "venv", str(folder)])
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    run([*pip, "install", *engine.needs], engine.build)
    if engine.after:
        run([*pip, "uninstall", "-y", *engine.after])
    if name in MORE:
        with suppress(subprocess.CalledProcessError):
            run([*pip, "install", "--no-deps", *MORE[name]])
    (folder / "failed").unlink(missing_ok=True)
    (folder / "installed").touch()


def run(command: list[str], build: dict[str, str] | None = None) -> None:
    subprocess.run(command, check=True, stderr=subprocess.PIPE, text=True, env=os.environ | (build or {}))


if __name__ == "__main__":
    main()
