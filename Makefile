# On a bare machine: python3 with venv, make, a C++ compiler. The environment is made here and nowhere else.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
# Test processes at most; fewer where there are fewer cores.
WORKERS ?= 8
ARGS ?=

# The CuPy extra of the driver's CUDA major; a newer driver runs the newest known one. Empty without a GPU.
CUPY := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA[A-Za-z ]*Version: *\([0-9][0-9]*\).*/\1/p' | \
	awk '$$1 == 12 {print ",cuda12x"} $$1 > 12 {print ",cuda13x"}')

.PHONY: verify test lint clean
.NOTPARALLEL:

verify: $(VENV)/verify.stamp
	$(PY) -m verify $(ARGS)

test: lint
	$(PY) -m pytest -n auto --maxprocesses $(WORKERS) $(ARGS)

lint: $(VENV)/test.stamp
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# Without ensurepip, venv leaves a half environment behind: pip's presence is what counts.
$(VENV)/%.stamp: pyproject.toml
	test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --disable-pip-version-check -e '.[$*$(CUPY)]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info verify-report bench-report .*_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
