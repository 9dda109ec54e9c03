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

.PHONY: setup test test-slow lint format train bench reproduce reproduce-full

setup: $(VENV)/.setup-done

# torch comes first and pinned: an unpinned torch may resolve to gigabytes of another build. The
# package is built with the setuptools installed here, so its build environment fetches nothing.
$(VENV)/.setup-done: pyproject.toml constraints.txt
	@python=python3; ! python3.11 -c '' 2>/dev/null || python=python3.11; \
	[ -x $(VENV)/bin/pip ] || $$python -m venv --clear $(VENV)
	$(PIP) torch setuptools
	$(PIP) --no-build-isolation --config-settings editable_mode=compat --editable '.[test,flows,recipes,bench,hf]'
	$(PY) -c 'import lipformer'
	@touch $@

# Keeps oneDNN's bfloat16 matmuls to instruction sets below AMX (a cap: other CPUs are unaffected).
# It must be set before torch loads, and a package must not choose it for its users.
test test-slow train reproduce reproduce-full: export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16

test: lint
	$(PYTEST) $(PYTEST_ARGS)

# pytest exits with 5 when no test is marked slow.
test-slow: setup
	$(PYTEST) -m slow $(PYTEST_ARGS) || [ $$? -eq 5 ]

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy $(SOURCES)

format: setup
	$(PY) -m ruff check --fix --exit-zero .
	$(PY) -m ruff format .

# The quickstart: trains, certifies and inverts a small model, and leaves a report in runs/quickstart.
train: setup
	$(PY) -m training fit --config recipes/quickstart.yaml

bench: setup
	$(PY) -m recipes.bench.attention

# The experiments of the papers: small ones in report/papers/quick, full ones (hours) in report/papers/full. What is
# finished is not run again. DATA is a directory with ptb/ and tinyshakespeare.txt; without it texts are the hub's.
PAPERS := $(PY) -m recipes.papers $(if $(DATA),--data $(DATA))
reproduce: setup
	$(PAPERS) --quick

reproduce-full: setup
	$(PAPERS)
