# Each target sets itself up: python3 >= 3.11 with venv is all it asks for.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: demo run test check bench lock clean

demo: $(VENV)/.runtime
	@$(BIN)/headrace demo $(ARGS)

run: $(VENV)/.runtime
	@$(BIN)/headrace run $(ARGS)

test: $(VENV)/.dev
	@# 5: none of the tests that ARGS names are of this kind
	@$(BIN)/python -m pytest -n auto -m "not alone" $(ARGS) || test $$? = 5
	@$(BIN)/python -m pytest -n 0 -m alone $(ARGS) || test $$? = 5

check: $(VENV)/.dev
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/headrace check config/example.toml
	@$(BIN)/python -m pytest -n 0 tests/test_layers.py tests/test_readme.py

bench: $(VENV)/.dev
	@$(BIN)/python -m bench $(ARGS)

# The interpreter is checked first, so that an old one is named rather than failing deep inside an install.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "headrace needs Python 3.11 or newer; this is %d.%d. Name another one: make PYTHON=python3.12" % sys.version_info[:2])'
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: requirements.lock pyproject.toml | $(VENV)/bin/python
	@test -e $(VENV)/.dev || $(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: requirements-dev.lock pyproject.toml | $(VENV)/bin/python
	@$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements-dev.lock
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@ $(VENV)/.runtime

# Needs uv. The locks hold for every supported interpreter and name hashes only.
lock:
	uv pip compile --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header -q --upgrade --group build pyproject.toml -o requirements.lock
	uv pip compile --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header -q --upgrade --group build --group dev pyproject.toml -o requirements-dev.lock

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis
