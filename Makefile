# Two commands do everything on a fresh machine: `make quickstart` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
TORCH  := $(shell sed -n 's/^\(torch==.*\)$$/\1/p' requirements/cpu.txt)
READY  := $(VENV)/.ready

.PHONY: quickstart test lint format docs clean

quickstart: $(READY)
	$(BIN)/grpo-ray train configs/quickstart.yaml

# In two processes, each file in one of them: what a file's tests share is started once. In the files' order, as
# the default, those with the fewest tests last, leaves the longest to the end.
test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python .ci/check_prose.py

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Into site/; a warning is an error. The tests build it too. The variable silences a notice of what comes after mkdocs.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache site

# torch comes first: its CPU wheel is found locally (pip's find-links) or on PyTorch's own index.
# Everything else is pinned and needs no resolving, so --no-deps is both faster and exact.
$(READY): requirements/cpu.txt requirements/dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "grpo_ray needs Python >= 3.11; choose one with: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@echo "Creating $(VENV) (4 GB; a few minutes, once) ..."
	$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install -q --no-deps "$(TORCH)" 2>/dev/null || \
	  $(BIN)/pip install -q --no-deps "$(TORCH)" --index-url https://download.pytorch.org/whl/cpu
	@$(BIN)/pip install -q --no-deps -r requirements/cpu.txt -r requirements/dev.txt
	@$(BIN)/pip install -q --no-deps --no-build-isolation -e .
	@touch $@
