# Needs Python 3.11 or newer with its headers, a C compiler and bash. Everything is installed into $(VENV); a change of
# pyproject.toml or of a C file updates it.
PYTHON ?= python3
VENV ?= .venv
# Ranks of the demo need torch; name another version, or a wheel, with TORCH=...
TORCH ?= torch==2.13.0
# For make sim: how many scenarios, or which one to tell.
SEEDS ?= 1000
SEED ?=
# For the tool that is called: make test ARGS='-k waves', make demo ARGS='--requests 60'
ARGS ?=

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
# -I: neither the checkout nor PYTHONPATH may shadow a library (our proto/ would hide a package of that name).
RUN := $(VENV)/bin/python -Im

.PHONY: demo test sim explore mutate check fmt clean

demo: $(VENV)/.ready  ## run a small fleet on this machine and watch its waves
	$(VENV)/bin/wavekeeper demo $(ARGS)

test: $(VENV)/.ready  ## run the tests
	$(RUN) pytest $(ARGS)

sim: $(VENV)/.ready  ## play SEEDS scenarios on the cores in virtual time, or tell the story of one SEED
	$(VENV)/bin/python -I tests/sim/__main__.py sim $(if $(SEED),--seed $(SEED),--seeds $(SEEDS)) $(ARGS)

mutate: $(VENV)/.ready  ## make each deliberate mistake in the cores, and see that it is caught
	$(VENV)/bin/python -I tests/sim/__main__.py mutations

explore: $(VENV)/.ready  ## visit the states of small systems, every interleaving
	$(VENV)/bin/python -I tests/sim/__main__.py explore $(ARGS)

check: $(VENV)/.ready  ## lint, format check, types
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy | sed 's#^\.src/wavekeeper/##'

fmt: $(VENV)/.ready  ## mend what the linter can mend, and format
	$(RUN) ruff check --fix .
	$(RUN) ruff format .

clean:  ## remove the environment and everything that was built
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# pip 25.1 is the first one that knows dependency groups; setuptools 77 the first one that knows our licence field.
$(VENV)/.ready: pyproject.toml proto/_rows.c worker_agent/exchange/_shm.c
	$(PYTHON) -m venv $(VENV)
	$(RUN) pip install --upgrade 'pip>=25.1' 'setuptools>=77'
	$(RUN) pip install '$(TORCH)'
	$(RUN) pip install --editable '.[server,demo]' --group dev
	touch $@
