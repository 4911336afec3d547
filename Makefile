# Everything a contributor runs. `make help` lists it.
#
# .venv is made on first use. Three stamps say what is in it: .core (what the demo needs), .server and .dev (tests, checks,
# benchmarks); they are redone when pyproject.toml or constraints.txt changes.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PORT   := 8000
MODEL  := models/SmolLM2-135M-Instruct.Q4_1.gguf

# Read by every pip call below and by those that pip makes itself for a build environment: no call can pick another torch.
# Newer pips take the second name for build environments, older ones ignore it.
export PIP_CONSTRAINT       := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help demo test test-long check check-format check-lint check-types format bench-cpu sim-residency model serve clean

help: ## list the targets
	@sed -nE 's/^([a-z][a-z-]*):.*## (.*)/  make \1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{printf "%-21s %s\n", $$1, $$2}'

demo: $(VENV)/.core $(MODEL) ## one mixed batch: the base model and several adapters answer at once
	$(BIN)/python examples/demo.py

serve: $(VENV)/.server $(MODEL) ## an OpenAI server on localhost: the built-in model and the example adapters
	@printf '%s\n' '' 'When it says "ready", from another terminal (a model is any folder of examples/adapters, too):' '' \
	  "  curl http://127.0.0.1:$(PORT)/v1/chat/completions -H 'Content-Type: application/json' \\" \
	  "    -d '{\"model\": \"pirate\", \"messages\": [{\"role\": \"user\", \"content\": \"What is the sea?\"}], \"max_tokens\": 32, \"temperature\": 0}'" ''
	$(BIN)/interleaf serve $(MODEL) --adapters-dir examples/adapters --port $(PORT)

# Two pytest processes of one torch thread each, a file to a process: small operations gain nothing from a second thread, and
# threads that compete for a core are many times slower. Plain `pytest` runs one process (tests/conftest.py sets its threads).
# Files in the order of their names: the slow ones of e2e first, the light ones of unit fill up the end.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test: $(VENV)/.dev $(MODEL) ## the tests, in minutes; needs no GPU
	$(PYTEST)

test-long: $(VENV)/.dev $(MODEL) ## all tests that need no GPU, with long state machines and sweeps
	$(PYTEST) -m "not gpu" --hypothesis-profile=long --timeout=3600

check: check-format check-lint check-types ## formatting, lint and types
check-format: $(VENV)/.dev
	$(BIN)/ruff format --check .
check-lint: $(VENV)/.dev
	$(BIN)/ruff check .
check-types: $(VENV)/.dev
	$(BIN)/mypy

format: $(VENV)/.dev ## format, and fix what lint can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench-cpu: $(VENV)/.dev $(MODEL) ## throughput on this CPU, beside PEFT and transformers
	$(BIN)/python -m bench.cpu

sim-residency: $(VENV)/.core ## simulate adapters that outgrow the pool; rewrites docs/benchmarks/sim/residency.*
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.sim_residency

model: $(MODEL) ## fetch the built-in model (93 MB)

clean: ## remove what the targets made: .venv, models, caches
	rm -rf $(VENV) models build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.made:
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) not found; name a Python 3.11 or newer: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("error: Interleaf needs Python 3.11 or newer; $(PYTHON) is %d.%d. Name another: make PYTHON=python3.11" % v[:2])'
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/.core: pyproject.toml constraints.txt | $(VENV)/.made
	$(BIN)/python -m pip install -e .
	@touch $@

$(VENV)/.server: $(VENV)/.core
	$(BIN)/python -m pip install -e '.[server]'
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	$(BIN)/python -m pip install -e '.[dev]'
	@touch $@

$(MODEL): | $(VENV)/.made
	$(BIN)/python scripts/fetch_model.py $@
