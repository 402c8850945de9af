# `make demo` and `make test` need nothing before them but Python 3.10+ and a package registry.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test lint types unit slow docs clients clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@echo "Making $(VENV) (first time: a few minutes, mostly PyTorch) ..."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $(STAMP)

demo: $(STAMP)
	@$(BIN)/aparte demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# A worker per core, each with one thread of its own; one that is done takes work from the other.
unit: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --dist worksteal -m "not slow"

# The tests that take long: the default model on real prompts, whole audits, whole benchmarks.
slow: $(STAMP)
	$(BIN)/pytest -m slow

# Programs that the API is tested with. Their environment is their own: some of them want older versions of others.
clients: build/clients/.installed

build/clients/.installed: tests/gateway/clients/requirements.txt
	$(PYTHON) -m venv build/clients
	build/clients/bin/python -m pip install --quiet --disable-pip-version-check uv
	build/clients/bin/uv pip install --quiet --python build/clients/bin/python --requirements $<
	@touch $@

docs: $(STAMP)
	$(BIN)/mkdocs build --strict

test: lint types docs unit

clean:
	rm -rf $(VENV) site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
