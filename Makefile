# make demo      real training on two simulated nodes of this machine: no root, no Slurm
# make test      lint, types, real training, a real Slurm where root may start one: 12 to 24 minutes
# make check     the fast part of it: no Slurm, no training
# make check-user, check-newer  the fast part as another user, and with a newer Python; as root
# make test-all  the long form: every fault, each guide's training, 64 nodes
# make site      these pages as a web site, in build/site

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install $(if $(MAKE_TERMOUT),,--quiet) --constraint constraints.txt

# Workers mostly wait, for Slurm or for processes: there are more of them than cores.
CHECK := HYPOTHESIS_PROFILE=same $(BIN)/python -m pytest -q -n 4 --dist worksteal --part fast
SIDE_BY_SIDE := $(BIN)/python -m pytest -q -n 4 --dist loadgroup --durations=15

.PHONY: demo test test-all check check-user check-newer lint slurm site diagnose-score clean

demo: $(VENV)/.train
	cd examples && $(abspath $(BIN))/clusterrun submit --cluster local --nodes 2 --gpus-per-node 2 --device cpu --follow train_lm.py --max-steps 150
	@echo 'Next: source $(VENV)/bin/activate && cd examples, then'
	@echo '  clusterrun status          how the run went, and where its directory is'
	@echo '  clusterrun logs -a         what every rank wrote'
	@echo '  clusterrun submit --nodes 2 --gpus-per-node 2 --strategy fsdp --device cpu --follow'

test: slurm check
	$(SIDE_BY_SIDE) --part slow

test-all: lint slurm site $(VENV)/.styles
	$(BIN)/python -m pytest -q -n 4 --part fast
	$(SIDE_BY_SIDE) --part slow-and-long

check: lint
	$(CHECK)
	@$(BIN)/python -m tests.test_house

check-user check-newer: $(VENV)/.dev
	$(BIN)/python -m tests.elsewhere $(@:check-%=%)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

slurm: $(VENV)/.dev
	$(BIN)/python -m tests.cluster install || [ -z "$$CLUSTERRUN_REQUIRE_ALL" ]

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "clusterrun needs Python 3.10 or newer")'
	$(PYTHON) -m venv $(VENV) || { echo "hint: on Debian, 'apt install python3-venv' brings the venv module"; rm -rf $(VENV); exit 1; }

$(VENV)/.train: $(VENV)/bin/python setup.cfg pyproject.toml constraints.txt
	$(PIP) --editable '.[train]'
	touch $@

$(VENV)/.dev: $(VENV)/.train
	$(PIP) --editable '.[train,examples,dev]'
	touch $@

# What `make test-all` trains with and nothing here needs.
$(VENV)/.styles: $(VENV)/.dev
	$(PIP) --editable '.[train,examples,dev,styles]'
	touch $@

$(VENV)/.site: $(VENV)/bin/python setup.cfg constraints.txt
	$(PIP) --editable '.[site]'
	touch $@

site: $(VENV)/.site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Scores `clusterrun diagnose` on logs of known causes: DIR has NAME/log.txt and NAME/meta.json.
diagnose-score: $(VENV)/.dev
	$(BIN)/python -m benchmarks.diagnose score $(DIR) --min $(or $(MIN),0.95)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
