# msmon: `make demo` shows it at work, `make test` is what CI runs. Both set everything up by themselves.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
COMPAT_VENV := .compat-venv
JOBS ?= 2
# DeepSpeed compiles nothing when it is installed, and does not look for a device.
FRAMEWORKS_ENV := DS_BUILD_OPS=0 DS_ACCELERATOR=cpu
DEMO_OUTPUT := demo_output

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-fast test-compat lint format docs bench pin clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(READY) ## Make the environment: .venv, pinned requirements, msmon itself

$(READY): requirements/dev.txt requirements/frameworks.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --requirement requirements/dev.txt
	$(FRAMEWORKS_ENV) $(BIN)/python -m pip install --quiet --requirement requirements/frameworks.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $(READY)

demo: $(READY) ## Watch a real training of two processes for a minute, then show what was recorded
	PATH="$(CURDIR)/$(BIN):$$PATH" OMP_NUM_THREADS=1 msmon run --output $(DEMO_OUTPUT) \
	  --config examples/gpt/monitor.json -- \
	  torchrun --standalone --nproc-per-node 2 examples/gpt/train.py
	$(BIN)/python examples/gpt/show.py $(DEMO_OUTPUT)

test: $(READY) lint ## Everything: lint, types, generated files, all tests
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup

test-fast: $(READY) ## The quick subset, under two minutes
	$(BIN)/python -m pytest -n $(JOBS) -m "not slow"

test-compat: $(READY) $(COMPAT_VENV)/.ready ## Compare with the original, in an environment of its own
	MSMON_COMPAT_PYTHON="$(CURDIR)/$(COMPAT_VENV)/bin/python" $(BIN)/python -m pytest tests/compat

$(COMPAT_VENV)/.ready: requirements/compat.txt
	test -x $(COMPAT_VENV)/bin/python || $(PYTHON) -m venv $(COMPAT_VENV)
	$(COMPAT_VENV)/bin/python -m pip install --quiet --requirement requirements/compat.txt
	@touch $@

lint: $(READY) ## Formatting, ruff, mypy, generated files
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python scripts/gen_docs.py --check
	$(BIN)/python scripts/gen_completions.py --check

format: $(READY) ## Format and mend what can be mended by machine
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(READY) ## Write generated files anew: docs/configuration.md, completions
	$(BIN)/python scripts/gen_docs.py
	$(BIN)/python scripts/gen_completions.py

bench: $(READY) ## Benchmarks: what watching costs, against its targets; figures in figures.json
	$(BIN)/python benchmarks/report.py --json figures.json
	$(BIN)/python benchmarks/alerts.py
	$(BIN)/python benchmarks/offline.py

pin: ## Write requirements/dev.txt and frameworks.txt anew from dev.in and frameworks.in
	rm -rf $(VENV)-pin
	$(PYTHON) -m venv $(VENV)-pin
	$(VENV)-pin/bin/python -m pip install --quiet --requirement requirements/dev.in
	$(VENV)-pin/bin/python -m pip freeze | sed 's/^torch==\([0-9.]*\).*/torch==\1/' > requirements/dev.txt
	$(FRAMEWORKS_ENV) $(VENV)-pin/bin/python -m pip install --quiet --constraint requirements/dev.txt --requirement requirements/frameworks.in
	$(VENV)-pin/bin/python -m pip freeze | sed 's/^torch==\([0-9.]*\).*/torch==\1/' | grep -vxFf requirements/dev.txt > requirements/frameworks.txt
	rm -rf $(VENV)-pin

clean: ## Remove environments, caches and recorded output
	rm -rf $(VENV) $(COMPAT_VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis $(DEMO_OUTPUT)
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
