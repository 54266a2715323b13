# Thin on purpose: tools/setup_env.py makes .venv, the package does the rest.
#   make lab          set up (first time: a few minutes), then JupyterLab at the first chapter
#   make test         set up, then the tests
#   make book         set up with Sphinx, then the book: build/book/index.html (BOOK="--solutions" adds the solutions)
#   make book-check   the same without running the chapters: a minute, and each warning and broken link is an error
#   GPU=1             with any: PyTorch's CUDA build

PYTHON ?= python3
SETUP = $(PYTHON) tools/setup_env.py $(if $(filter 1,$(GPU)),--gpu)
PYTEST = .venv/bin/python -m pytest -n 2 --dist loadgroup

.PHONY: lab test test-slow book book-check setup doctor

lab: setup
	@.venv/bin/jfa lab $(LAB)

test: setup
	@$(PYTEST) -m "not slow" $(TESTS)

test-slow: setup
	@$(PYTEST) $(TESTS)

book:
	@$(SETUP) --book
	@.venv/bin/python -m book $(BOOK)

book-check:
	@$(SETUP) --book
	@.venv/bin/python -m book --no-execute --to build/book-check $(BOOK)

doctor: setup
	@.venv/bin/jfa doctor

setup:
	@$(SETUP)
