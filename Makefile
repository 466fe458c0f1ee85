# Every target works on a fresh clone with nothing but make and Python >= 3.11: it builds a virtual
# environment of its own (.venv-<version>), installs the project there, and reuses it next time.
#
#   make demo                       a small diffusion language model answers real prompts, and a
#                                   picture of its accuracy against speed
#   make test                       the fast tests          (one file: ARGS=tests/cli)
#   make test-all                   the fast tests, then the slow ones
#   make test-exhaustive            every case of every test (hours)
#   make lint                       ruff and mypy
#   make bench                      speed, and accuracy against speed, on this machine: 4 minutes
#   make bench-full                 the same in full, into benchmarks/results
#   make kernels-check              compile the GPU kernels, no GPU needed (Python >= 3.12)
#   make program-check              compile the decode programs of 8-billion-parameter models, likewise
#   make gpu-check                  compare and time them on this machine's NVIDIA GPU
#   make test PYTHON=python3.12     another Python, and with it the newest JAX

USABLE = import sys; sys.exit(sys.version_info < (3, 11))
CANDIDATES = python3 python3.13 python3.12 python3.11
PYTHON ?= $(shell for p in $(CANDIDATES); do \
            $$p -c '$(USABLE)' >/dev/null 2>&1 && echo $$p && break; done)
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
VENV ?= .venv-$(VERSION)
PY = $(VENV)/bin/python
PIP_INSTALL = $(PY) -m pip install --quiet --disable-pip-version-check

# Test processes; files, not single tests, are handed out, so that compiled programs are shared.
JOBS ?= 2
# PyTorch, the judge of the layer tests: 1 installs it, 0 does without (those tests are skipped),
# auto installs it where pip would take a build for the CPU only.
ORACLE ?= auto
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-all test-exhaustive lint format bench bench-full clean
.PHONY: gpu-compiler kernels-check program-check gpu-check

help:
	@sed -n 's/^#   //p' Makefile

# One stamp per set of extras; a new pyproject.toml installs again.
$(PY):
	@$(PYTHON) -c '$(USABLE)' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: pyproject.toml | $(PY)
	$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.test: pyproject.toml | $(PY)
	$(PIP_INSTALL) -e '.[test]'
	@touch $@

$(VENV)/.lint: pyproject.toml | $(PY)
	$(PIP_INSTALL) -e '.[lint]'
	@touch $@

$(VENV)/.bench: pyproject.toml | $(PY)
	$(PIP_INSTALL) -e '.[bench]'
	@touch $@

$(VENV)/.oracle-$(ORACLE): $(VENV)/.test
	@if [ '$(ORACLE)' = 1 ] || { [ '$(ORACLE)' = auto ] && \
	    $(PY) -m pip install --dry-run --no-deps --ignore-installed --quiet --report - \
	      "$$($(PY) -c 'import tomllib; print(tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["oracle"][0])')" \
	      2>/dev/null | grep -qE '[+]cpu|%2Bcpu|macosx'; }; \
	  then echo "$(PIP_INSTALL) -e '.[oracle]'"; $(PIP_INSTALL) -e '.[oracle]'; \
	  else echo 'PyTorch left out; the tests against it are skipped (make test ORACLE=1 installs it)'; fi
	@touch $@

DEMO_FRONTIER = --policies vanilla,parallel,fast-dllm-dual,polestar --limit 12 \
  --tokens-per-pass 1,2,4 --thresholds 0.5,0.7,0.9 --no-trace --restart --out demo

demo: $(VENV)/.bench
	$(VENV)/bin/polestar-jax demo $(ARGS)
	@echo
	@echo 'Accuracy against tokens per forward, some dozens of prompts it has never seen; a minute.'
	@$(PY) -m benchmarks.frontier $(DEMO_FRONTIER) >/dev/null
	@echo 'The picture: demo/frontier_embedded.png'

PYTEST = $(PY) -m pytest -n $(JOBS) --dist loadfile

test: $(VENV)/.oracle-$(ORACLE)
	$(PYTEST) $(ARGS)

test-slow: $(VENV)/.oracle-$(ORACLE) gpu-compiler
	$(PYTEST) -m 'slow and not exhaustive' $(ARGS)
	$(call gpu_compiler_tests,and not exhaustive)

test-exhaustive: $(VENV)/.oracle-$(ORACLE) gpu-compiler
	$(PYTEST) -m 'slow or not slow' $(ARGS)
	$(call gpu_compiler_tests)

test-all: test test-slow

lint: $(VENV)/.lint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(VENV)/.lint
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: $(VENV)/.bench
	$(PY) -m benchmarks.decode --shape 4x128 --shape 8x512 --batch 1 --repeats 2 --rounds 5 \
	  --total 256 --out bench/decode.json
	$(PY) -m benchmarks.frontier --quick --restart --out bench $(ARGS)

bench-full: $(VENV)/.bench
	$(PY) -m benchmarks.decode
	$(PY) -m benchmarks.frontier $(ARGS)

# The GPU compiler needs Python >= 3.12 and the newest JAX, so it has an environment of its own.
AOT_USABLE = import sys; sys.exit(sys.version_info < (3, 12))
AOT_CANDIDATES = python3 python3.12 python3.13 $(wildcard $(HOME)/.pyenv/versions/3.1[2-9]*/bin/python3)
AOT_PYTHON ?= $(shell for p in $(AOT_CANDIDATES); do \
                $$p -c '$(AOT_USABLE)' >/dev/null 2>&1 && echo $$p && break; done)
AOT_VENV ?= .venv-gpu-check

# Tests that the environment above skips: they need the newest JAX, or the compiler inside it.
gpu_compiler_tests = @if [ -n '$(AOT_PYTHON)' ] && [ -z '$(ARGS)' ]; then \
    $(AOT_VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile -m '(gpu_compiler or newest_jax) $(1)'; fi

$(AOT_VENV)/.ready: pyproject.toml
	@test -n '$(AOT_PYTHON)' || { echo "Python 3.12 or newer is needed: make $(MAKECMDGOALS) AOT_PYTHON=..." >&2; exit 1; }
	$(AOT_PYTHON) -m venv $(AOT_VENV)
	$(AOT_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[gpu-check]'
	@touch $@

$(AOT_VENV)/.test: $(AOT_VENV)/.ready
	$(AOT_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[gpu-check,test]'
	@touch $@

# Some slow tests call the targets below, at once: the environment must be there before them.
gpu-compiler:
	@if [ -n '$(AOT_PYTHON)' ]; then $(MAKE) --no-print-directory $(AOT_VENV)/.test; \
	  else echo 'No Python >= 3.12: tests that compile for GPUs are skipped'; fi

kernels-check: $(AOT_VENV)/.ready
	$(AOT_VENV)/bin/python -m polestar_jax.kernels.compile_check $(ARGS)

program-check: $(AOT_VENV)/.ready
	$(AOT_VENV)/bin/python -m benchmarks.gpu_program $(ARGS)

# On a machine with a GPU; GPU_PY=python3 uses an environment that has jax[cuda13] already.
$(VENV)/.gpu: pyproject.toml | $(PY)
	$(PIP_INSTALL) -e '.[cuda13,bench]'
	@touch $@

GPU_PY ?= $(PY)
gpu-check: $(if $(filter $(PY),$(GPU_PY)),$(VENV)/.gpu)
	$(GPU_PY) -m benchmarks.kernels --only llada-8b/bfloat16 --json benchmarks/results/gpu_kernels.json
	$(GPU_PY) -m benchmarks.gpu_step --json benchmarks/results/gpu_step.json

clean:
	rm -rf .venv-* bench demo build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
