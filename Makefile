# Everything that a developer runs. `make help` lists it.

# The interpreter that makes the environment; Megatron's wheel is tested on 3.12 only.
PYTHON312 ?= python3.12
# Where `make demo` trains: cpu or cuda.
DEVICE ?= cpu
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Tests of a file share what is slow to make, so they stay in one process.
PYTEST := $(BIN)/python -m pytest --maxprocesses 8 --dist loadfile --no-loadscope-reorder
# One more than there are processors: ranks wait for one another, a seventh of the time.
PROCESSES := $$($(BIN)/python -c \
	"from zorse_megatron.processes import num_processors as n; print(n() + 1)")

# A run that hangs ends here and tells what failed.
TEST_LIMIT ?= 60m

# Processes by the hundred import the same modules: compile them once, whatever the shell says.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo test check lint collect clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED) ## Make .venv and install the package into it (done by the others if need be)

# An environment that was left half made has no working pip and is made anew.
$(INSTALLED): pyproject.toml
	@command -v $(PYTHON312) >/dev/null || { \
		echo "make: found no $(PYTHON312); expected Python 3.12. Install it, or name it:" \
			"make PYTHON312=/path/to/python3.12" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON312) -m venv --clear $(VENV)
	@echo "installing into $(VENV): some minutes the first time ..."
	@$(BIN)/python -m pip install --quiet --editable '.[dev,train,plots]'
	@touch $@

demo: $(INSTALLED) ## Plan a mixed cluster, train under the plan beside stock Megatron, compare (4 minutes)
	@$(BIN)/python -m zorse_megatron.demo --device $(DEVICE)

test: $(INSTALLED) ## Run the linters and all tests
	@$(MAKE) --no-print-directory --jobs 2 lint collect
	@timeout --foreground --signal INT --kill-after 60 $(TEST_LIMIT) \
		$(PYTEST) --numprocesses $(PROCESSES) --durations 20

check: lint ## Run the linters and the quick tests of tests/unit (a minute on two cores)
	@$(PYTEST) --numprocesses auto tests/unit -m "not slow" --durations 5

lint: $(INSTALLED) ## Run the linters alone: format, style, types, layers
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports --no-logo >$(VENV)/lint-imports.txt || { cat $(VENV)/lint-imports.txt; exit 1; }

# Compiles the tests, before each test process would; mypy takes as long.
collect: $(INSTALLED)
	@$(BIN)/python -m pytest --collect-only -qq >$(VENV)/collected.txt || { \
		cat $(VENV)/collected.txt; exit 1; }

clean: ## Remove what demo, tests and tools leave behind; .venv stays
	@rm -rf demo-output build dist .pytest_cache .ruff_cache .mypy_cache .import_linter_cache \
		.hypothesis
	@find . -path ./$(VENV) -prune -o -type d \( -name __pycache__ -o -name '*.egg-info' \) \
		-print0 | xargs -0 rm -rf
