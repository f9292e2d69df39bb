# Everything runs in .venv, made from PYTHON (3.11 or newer). Works with the make that macOS brings (3.81).
PYTHON ?= python3
VENV ?= .venv
PYTEST_WORKERS ?= 2
# A held-out question: training never saw it.
PROMPT ?= Please write a class Trip in Python that has map and lamp and picture.
BIN := $(VENV)/bin

.PHONY: demo test lint train-demo bench-demo mac-check clean

demo: $(VENV)/.demo
	$(BIN)/specmlx generate --prompt "$(PROMPT)" --max-tokens 128 --num-draft-tokens full

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Hours on one core. What is done so far is kept in runs/demo; the same command goes on from there.
train-demo: $(VENV)/.demo
	$(BIN)/python examples/make_demo all --work runs/demo

# Held-out answers and acceptance by kind, then speed by width against plain decoding: some minutes.
bench-demo: $(VENV)/.demo
	$(BIN)/python -m specmlx.demo.evaluate
	$(BIN)/python benchmarks/demo_speed.py

# On a Mac: the kernels' tests on its GPU and their speed. Attach mac-check.json to an issue.
mac-check: $(VENV)/.dev
	$(BIN)/python benchmarks/mac_check.py

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "specmlx needs Python 3.11 or newer, $(PYTHON) is %d.%d: make PYTHON=/path/to/python3.11" % v[:2])'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.demo: $(VENV)/.python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV)
