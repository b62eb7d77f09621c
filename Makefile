# make demo   real training on two simulated nodes of this machine: no root, no Slurm
# make test   everything: lint, types, real training, a real Slurm where root may start one
# make check  the fast part of it: no Slurm, no training

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
FAST := not slurm and not torch and not agents and not install
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: demo test check lint slurm clean

demo: $(VENV)/.train
	cd examples && $(abspath $(BIN))/clusterrun submit --cluster local --nodes 2 --gpus-per-node 2 --device cpu --follow train_lm.py --max-steps 150
	@echo 'Next: source $(VENV)/bin/activate && cd examples, then'
	@echo '  clusterrun status          how the run went, and where its directory is'
	@echo '  clusterrun logs -a         what every rank wrote'
	@echo '  clusterrun submit --nodes 2 --gpus-per-node 2 --strategy zero2 --device cpu --follow'

test: lint slurm
	$(BIN)/python -m pytest -q -n 2 -m "$(FAST)"
	$(BIN)/python -m pytest -q --durations=15 -m "not ($(FAST))"

check: lint
	$(BIN)/python -m pytest -q -n 2 -m "$(FAST)"

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

slurm: $(VENV)/.dev
	$(BIN)/python -m tests.cluster install || [ -z "$$CLUSTERRUN_REQUIRE_SLURM" ]

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "clusterrun needs Python 3.10 or newer")'
	$(PYTHON) -m venv $(VENV) || { echo "hint: on Debian, 'apt install python3-venv' brings the venv module"; rm -rf $(VENV); exit 1; }

$(VENV)/.train: $(VENV)/bin/python setup.cfg pyproject.toml constraints.txt
	$(PIP) --editable '.[train]'
	touch $@

$(VENV)/.dev: $(VENV)/.train
	$(PIP) --editable '.[train,examples,dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
