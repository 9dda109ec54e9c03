# Every target works on a fresh checkout with Python 3.10 or later and nothing installed.
VENV := .venv
PY := $(VENV)/bin/python
# Bytecode is not compiled for all that is installed (30 s) but written as modules are first imported,
# so that must be allowed.
PIP := $(PY) -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
unexport PYTHONDONTWRITEBYTECODE

# Two workers of one thread each: the tests are many and small, so they gain more from a second
# process than from a second thread in each kernel. A file stays on one worker, with its fixtures.
WORKERS ?= 2
PYTEST := $(PY) -m pytest --numprocesses $(WORKERS) --dist loadfile
PYTEST_ARGS ?=

# The directories that hold Python so far.
SOURCES := $(foreach dir,lipformer training recipes,$(if $(wildcard $(dir)/*.py $(dir)/*/*.py),$(dir)))

.PHONY: setup test test-slow lint docs format train bench dist reproduce reproduce-full

setup: $(VENV)/.setup-done

# torch comes first and pinned: an unpinned torch may resolve to gigabytes of another build. The
# package is built with the setuptools installed here, so its build environment fetches nothing. Of the last one
# docs/hooks.py takes a file, MathJax 3.2.2 as npm has it, and nothing needs the Sphinx it asks for.
$(VENV)/.setup-done: pyproject.toml constraints.txt
	@python=python3; ! python3.11 -c '' 2>/dev/null || python=python3.11; \
	[ -x $(VENV)/bin/pip ] || $$python -m venv --clear $(VENV)
	$(PIP) torch setuptools
	$(PIP) --no-build-isolation --config-settings editable_mode=compat --editable '.[test,flows,recipes,bench,hf,docs]'
	$(PIP) --no-deps sphinx-mathjax-offline
	$(PY) -c 'import lipformer'
	@touch $@

# Keeps oneDNN's bfloat16 matmuls to instruction sets below AMX (a cap: other CPUs are unaffected).
# It must be set before torch loads, and a package must not choose it for its users.
test test-slow train reproduce reproduce-full: export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16
# Threads that wait do not spin: on a busy machine spinning makes small models eight times slower.
train bench reproduce reproduce-full: export OMP_WAIT_POLICY ?= PASSIVE

test: lint docs
	$(PYTEST) $(PYTEST_ARGS)

# pytest exits with 5 when no test is marked slow.
test-slow: setup
	$(PYTEST) -m slow $(PYTEST_ARGS) || [ $$? -eq 5 ]

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy $(SOURCES)

# The site, to be opened as a file: site/index.html. The variable turns off an announcement of mkdocs-material.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs --quiet build --strict

format: setup
	$(PY) -m ruff check --fix --exit-zero .
	$(PY) -m ruff format .

# The quickstart: trains, certifies and inverts a small model, and leaves a report in runs/quickstart.
train: setup
	$(PY) -m training fit --config recipes/quickstart.yaml

bench: setup
	$(PY) -m recipes.bench.attention

# sdist and wheel of the last commit in dist/, built twice: the same bytes, or it fails.
dist: setup
	$(PY) .ci/dist.py

# The experiments of the papers: small ones in report/papers/quick, full ones (hours) in report/papers/full. What is
# finished is not run again. DATA is a directory with ptb/ and tinyshakespeare.txt; without it texts are the hub's.
PAPERS := $(PY) -m recipes.papers $(if $(DATA),--data $(DATA))
reproduce: setup
	$(PAPERS) --quick

reproduce-full: setup
	$(PAPERS)
