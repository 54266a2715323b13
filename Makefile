# Thin on purpose: tools/setup_env.py makes .venv, the package does the rest.
#   make lab          set up (first time: a few minutes), then JupyterLab at the first chapter
#   make test         set up, then the tests
#   GPU=1             with either: PyTorch's CUDA build

PYTHON ?= python3
SETUP = $(PYTHON) tools/setup_env.py $(if $(filter 1,$(GPU)),--gpu)
PYTEST = .venv/bin/python -m pytest -n 2 --dist loadgroup

.PHONY: lab test test-slow setup doctor

lab: setup
	@.venv/bin/jfa lab $(LAB)

test: setup
	@$(PYTEST) -m "not slow" $(TESTS)

test-slow: setup
	@$(PYTEST) $(TESTS)

doctor: setup
	@.venv/bin/jfa doctor

setup:
	@$(SETUP)
