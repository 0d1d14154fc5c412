# The six words of the house. Each sets up what it needs in .venv; nothing outside this folder is touched.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
TORCH  ?= torch==2.13.0

.PHONY: run install check lint test bench build clean
.DEFAULT_GOAL := run

run: $(VENV)/.package
	$(BIN)/muse-fn generate "Hello!" "What is 3 + 4?"

install: $(VENV)/.dev

# torch first and alone: a range would pull the CUDA build from the index.
$(VENV)/.torch: Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)"
	@touch $@

$(VENV)/.package: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[cpu]"
	@touch $@

$(VENV)/.dev: $(VENV)/.package
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[test,lint]"
	@touch $@

check: $(VENV)/.dev
	$(BIN)/pyright

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# One process for each processor: every test is one thread's work. JOBS=0 for a debugger.
JOBS ?= auto
test: lint check
	$(BIN)/pytest -n $(JOBS) --dist worksteal

bench: $(VENV)/.dev
	$(BIN)/python bench/cpu_decode.py

build: $(VENV)/.dev
	$(BIN)/pip install --quiet --disable-pip-version-check build
	$(BIN)/python -m build

clean:
	rm -rf $(VENV) build dist *.egg-info
