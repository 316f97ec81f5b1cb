# Needs Python 3.11 or newer and make. Everything else goes into .venv, from requirements/*.txt alone:
# each file there has a checked hash, so it does not matter where pip finds it.
#
# A stamp in .venv says that a set of requirements is installed; it is redone only when the set changes.
# `make demo ARGS=…` hands options on; `make PYTHON=…` chooses the interpreter of a new .venv.
# Tests find a PostgreSQL server by SAYSO_TEST_POSTGRES, on this machine, or start one from its programs.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
MAKEFLAGS += --no-builtin-rules --no-print-directory

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

ARGS ?=
PYTHON ?=
BIN := .venv/bin
# a worker for each core; tests own their files and ports
SIDE_BY_SIDE := -n auto --dist worksteal
STEP := @printf '%-9s %s\n'
PIP := @$(BIN)/python -m pip install -qq
LOCK := @$(BIN)/uv pip compile -q $(ARGS) --no-config --system-certs --universal --python-version 3.11 \
	--generate-hashes --no-annotate --custom-compile-command 'make lock'


##@ Run it

demo: .venv/.run .venv/.self ## Play the demo: no key, no network, nothing left behind
	@$(BIN)/sayso demo $(ARGS)

serve: .venv/.run .venv/.self ## Keep the demo's server running, and say what to type
	@$(BIN)/sayso demo --serve $(ARGS)


##@ Work on it

check: static ## Format, lint, types, layers; unit, simulation and conformance tests
	$(STEP) tests 'unit, simulation, conformance'
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE) tests/unit tests/simulation tests/conformance $(ARGS)

test: static ## All that check does, and the e2e tests: what CI runs
	$(STEP) tests 'all'
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(ARGS)

format: .venv/.dev ## Put the code in its form, and mend what ruff can mend
	$(STEP) format 'ruff'
	@$(BIN)/ruff check -q --fix-only .
	@$(BIN)/ruff format -q .

matrix: .venv/.dev .venv/.self ## Kill a real server at every commit and every await of nine stories (a few minutes)
	$(STEP) matrix 'every cell'
	@SAYSO_TEST_MATRIX=all $(BIN)/python -m pytest tests/e2e/test_crash_matrix.py $(ARGS)

bench: .venv/.dev .venv/.self ## Measure
	@$(BIN)/python -m bench $(ARGS)

docs: .venv/.dev .venv/.self ## Write the generated parts of the documents
	$(STEP) docs 'generated parts'
	@$(BIN)/python -m tools.scenarios
	@$(BIN)/python tools/architecture.py $(ARGS)

record: .venv/.dev .venv/.self ## Write the scenarios' logs anew, to be read in review
	$(STEP) record 'tests/recorded'
	@$(BIN)/python -m tools.record

lock: .venv/.lock ## Pin what pyproject.toml asks for (ARGS=--upgrade: at the newest versions)
	$(STEP) lock 'requirements/'
	$(LOCK) pyproject.toml -o requirements/runtime.txt
	$(LOCK) --group build -c requirements/runtime.txt -o requirements/build.txt
	$(LOCK) pyproject.toml --group dev -c requirements/runtime.txt -c requirements/build.txt -o requirements/dev.txt
	$(LOCK) --group lock -o requirements/lock.txt

clean: ## Remove .venv and what the tools left
	$(STEP) clean '.venv, caches, builds'
	@rm -rf .venv build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	@find src tests tools bench -type d -name __pycache__ -prune -exec rm -rf {} +

help: ## Show this list
	@awk 'BEGIN { FS = ":.*## " } \
		/^##@ / { printf "\n%s\n", substr($$0, 5) } \
		/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

.PHONY: demo serve check test format matrix bench docs record lock clean help static


# What is shown of the checks is what they found; a step that says nothing more found nothing.
static: .venv/.dev .venv/.self
	$(STEP) format 'ruff format --check'
	@$(BIN)/ruff format -q --check .
	$(STEP) lint 'ruff check'
	@$(BIN)/ruff check -q .
	$(STEP) types 'mypy'
	@$(BIN)/mypy --no-error-summary
	$(STEP) layers 'import-linter'
	@report=$$($(BIN)/lint-imports --no-cache --no-logo 2>&1) || { printf '%s\n' "$$report"; exit 1; }


# --- .venv ---

# One whose interpreter has gone is of no use, and its stamps lie.
$(shell test -x .venv/bin/python || rm -rf .venv)

.venv/bin/python:
	$(STEP) python 'a new .venv'
	@for python in $(or $(PYTHON),python3.11 python3 python3.12 python3.13 python3.14); do \
		"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
		"$$python" -m venv .venv && exit 0; \
		rm -rf .venv; \
		echo "make: $$python could not make a .venv; on Debian and Ubuntu: apt install python3-venv" >&2; \
		exit 1; \
	done; \
	echo 'make: no Python 3.11 or newer$(if $(PYTHON),: $(PYTHON), on PATH); name one with PYTHON=/path/to/python3' >&2; \
	exit 1

.venv/.run: requirements/runtime.txt .venv/bin/python
	$(STEP) install 'requirements/runtime.txt'
	$(PIP) --require-hashes -r requirements/runtime.txt
	@touch $@

.venv/.dev: requirements/dev.txt .venv/bin/python
	$(STEP) install 'requirements/dev.txt'
	$(PIP) --require-hashes -r requirements/dev.txt
	@touch $@

# In place: a changed source file needs no new installation, a changed script or version does.
.venv/.self: pyproject.toml requirements/build.txt .venv/bin/python
	$(STEP) install 'sayso, in place'
	$(PIP) --require-hashes -r requirements/build.txt
	$(PIP) --no-build-isolation --no-deps -e .
	@touch $@

.venv/.lock: requirements/lock.txt .venv/bin/python
	$(STEP) install 'requirements/lock.txt'
	$(PIP) --require-hashes -r requirements/lock.txt
	@touch $@
