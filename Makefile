# Each target makes .venv when it is missing; a second call does no work again.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: help quickstart test test-gpu check exactness soak lab notebooks clean
help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "FlashSpec needs Python 3.11 to 3.13; $(PYTHON) is $$($(PYTHON) -V 2>&1). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || \
	  { rm -rf .venv; echo "$(PYTHON) cannot make a virtual environment; on Debian or Ubuntu install python3-venv first."; exit 1; }
	@echo "installing into .venv (a minute or two) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[notebooks,test]'
	@touch $@

quickstart: $(STAMP)  ## a real model, plain and speculative, side by side
	$(BIN)/python -m flashspec_core.lab.notebooks quickstart

test: $(STAMP)  ## every test, the notebooks included
	$(BIN)/ruff check -q . && $(BIN)/ruff format -q --check .
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -q -n 2 --dist worksteal  # two at a time: who waits lets the other work

test-gpu: $(STAMP)  ## what needs a CUDA device: the kernels against the reference
	$(BIN)/python -m pytest -q -m gpu

check: test  ## exactly what CI runs

exactness: $(STAMP)  ## the long gates: 100 seeds, false alarms, the power of each gate against each fault
	$(BIN)/python -m flashspec_core.lab.mutants

soak: $(STAMP)  ## 2,000 short generations of mixed settings in one process
	FLASHSPEC_SOAK=2000 $(BIN)/python -m pytest -q tests/test_decode_options.py -k soak

lab: $(STAMP)  ## open JupyterLab on the notebooks
	$(BIN)/jupyter lab --notebook-dir=notebooks

notebooks: $(STAMP)  ## execute all notebooks and write their outputs back, normalised
	$(BIN)/python -m flashspec_core.lab.notebooks execute

clean:  ## remove what was built here (not the model cache)
	rm -rf .venv build
