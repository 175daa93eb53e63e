# Two commands matter: `make quickstart` and `make test`. The rest is in `make help`.

PYTHON ?= python3
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
KERNELS := $(wildcard kernels/*/*.c* kernels/*/*/*.c* kernels/*/*/*.h* tests/kernels/*.h tests/kernels/*.cpp tests/standin/*.cpp)

# The GPU suites need torch, transformers and Triton, not an installation: a PYTHON that is named comes before .venv.
GPU_PYTHON ?= $(if $(filter-out file,$(origin PYTHON)),$(PYTHON),$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)))
# BUDGET=MINUTES: of `make gpu`, after which no further case begins
BUDGET ?=
PYTHON_VERSION ?= 3.12
PLATFORM ?=
THERE ?=
GPU_FLAGS = $(if $(REHEARSE),--rehearse) $(if $(FORCE),--force) $(if $(RESULTS),--results $(RESULTS)) $(if $(REAL),--real $(REAL))
GPU_SUITE = $(GPU_PYTHON) -m benchmarks.gpu.gpu $(GPU_FLAGS) $(if $(BUDGET),--minutes $(BUDGET))

# a process has a thread of its own; each that runs tests steals from the other's end
WORKERS ?= 2
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# I/N, of `make test-slow` and `make test-all`: this part of so many
SHARD ?=
# FILE, of the same two: names of the cases that have passed, which need not run again
RESUME ?=

# of `make test-faults`: how long, the seed of its tries, and which kinds of faults
MINUTES ?= 30
SEED ?= 0
KINDS ?= kill,files,data,hostile,storm

STEPS ?= 1200
NODES ?= 18
FLAGS ?=

.PHONY: help install quickstart test test-all test-slow test-engines test-slurm test-faults checks kernels gpu gpu-wheels gpu-real gpu-check gpu-bench gpu-train gpu-two families targets export-matrix docs clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /\1|/' | awk -F'|' '{printf "make %-12s %s\n", $$1, $$2}'

install: $(VENV)/installed  ## create .venv and install drafttrain with its test tools (TORCH_INDEX=URL: where torch comes from)

# torch comes first and alone: no other package may choose its build. DeepSpeed compiles nothing here, its operators build when used.
$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
	  { echo "drafttrain needs Python 3.11 to 3.13, $(PYTHON) is $$($(PYTHON) -V 2>&1); run make PYTHON=python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@echo "installing torch, then the rest: some minutes"
	@command -v nvidia-smi >/dev/null || [ -n "$(TORCH_INDEX)" ] || \
	  echo "no NVIDIA GPU found: TORCH_INDEX=https://download.pytorch.org/whl/cpu gets the smaller CPU build"
	$(PIP) install -c constraints.txt setuptools wheel
	$(PIP) install -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	DS_BUILD_OPS=0 $(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@

quickstart: install  ## train Medusa heads for the embedded target and measure them with prompt lookup: minutes on two CPU cores
	$(BIN)/drafttrain fit recipe=medusa_lookup

test: install  ## the fast tests (WORKERS=2: processes)
	$(PYTEST)

test-slow: install  ## the slow tests alone; complete grids are left out (SHARD=1/2: the first half)
	SHARD=$(SHARD) RESUME=$(RESUME) $(PYTEST) -m "slow and not grid"

# in four parts: a process that has run thousands of cases holds too much memory to fork
test-all: install  ## all tests, complete grids too: an hour on two CPU cores (SHARD=1/4: the first of four parts; RESUME=FILE: goes on)
	@failed=0; for part in $(or $(SHARD),1/4 2/4 3/4 4/4); do \
	  SHARD=$$part RESUME=$(RESUME) $(PYTEST) -m "not engines and (not slurm or grid)" || failed=1; done; exit $$failed

test-engines: install  ## serving engines run what is exported here: installs them (6 GB), then some minutes for each family and engine
	$(BIN)/python -m tests.engines.install
	$(BIN)/python -m pytest -m engines tests/engines
	$(BIN)/python -m tests.support_matrix docs/export.md

test-slurm: install  ## a Slurm cluster of two nodes, two machines with a cable, Mooncake: installs them, needs root on Linux
	$(BIN)/python -m tests.slurm.install
	$(PYTEST) -m "slurm and not grid" tests/slurm
	$(PYTEST) -m "not grid" -k mooncake tests/unit/features tests/unit/engines tests/integration

test-faults: install  ## random kills, damaged files, malformed data, hostile input, request storms (MINUTES=30 SEED=0 KINDS=...)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults --minutes $(MINUTES) --seed $(SEED) --kinds $(KINDS) $(FLAGS)

checks: install  ## ruff, mypy, clang-format and the fast tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(if $(KERNELS),$(BIN)/clang-format --dry-run --Werror $(KERNELS))
	$(PYTEST)

targets: install  ## renew the table of docs/targets.md from tiny models of every architecture
	$(BIN)/python -m tests.targets docs/targets.md

families: install  ## all families with one budget, side by side: an hour on two CPU cores (STEPS=1200 NODES=18 FLAGS=...)
	$(BIN)/python benchmarks/families.py --steps $(STEPS) --nodes $(NODES) $(FLAGS)

export-matrix: install  ## renew the support matrix of docs/export.md
	$(BIN)/python -m tests.support_matrix docs/export.md

docs: install  ## the site of docs/ into build/site: no broken link, no page outside the navigation
	@$(BIN)/python -c 'import mkdocs, material, mkdocstrings' 2>/dev/null || $(PIP) install -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

kernels: install  ## compile the operators now rather than at their first use
	$(BIN)/python -m drafttrain.ops.build

gpu:  ## all the suites below in one command, the most important first; ends with the goals (BUDGET=45: minutes; REHEARSE=1; FORCE=1)
	$(GPU_SUITE)

gpu-wheels:  ## collect what such a machine may lack into wheels/, at most 64 MiB (PYTHON_VERSION=3.12 PLATFORM=... THERE=pyarrow,...)
	$(GPU_PYTHON) -m benchmarks.gpu.wheels --python $(PYTHON_VERSION) $(if $(PLATFORM),--platform $(PLATFORM)) $(if $(THERE),--there $(THERE))

gpu-check:  ## are all kernels and captured steps right on this GPU? (REHEARSE=1: tiny, on the CPU; FORCE=1; RESULTS=DIR)
	$(GPU_SUITE) --section check

gpu-bench:  ## how fast they are there, against what its memory allows; their checks come first
	$(GPU_SUITE) --section bench

gpu-train:  ## how fast training steps are there for a target of 8B, what the fused loss saves, whether drafters learn
	$(GPU_SUITE) --section train

gpu-two:  ## what needs two GPUs: NCCL, ZeRO 1 and 3, a target split over both, resuming (REHEARSE=1: two processes on the CPU)
	$(GPU_PYTHON) -m benchmarks.gpu.two $(if $(REHEARSE),--rehearse)

gpu-real:  ## pretrain a target of 300M there, distil drafters from it and measure them, within BUDGET=6 minutes (REAL=DIR: where)
	$(GPU_PYTHON) -m benchmarks.gpu.gpu $(GPU_FLAGS) --stages "real target" --minutes $(or $(BUDGET),6)

clean:  ## remove the environment and everything built, but no run in outputs/
	rm -rf $(VENV) .venv-engines build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
