# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready
JOBS ?= 2

.PHONY: demo test lint kernels clean

demo: $(READY)
	$(VENV)/bin/graphrt demo

test: $(READY)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q -n $(JOBS) --dist loadgroup

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/python tools/typecheck.py

kernels: $(READY)
	$(VENV)/bin/python tools/compile_check.py --arch sm_90a sm_100a

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q --upgrade pip
	$(VENV)/bin/python -m pip install -q -c constraints.txt -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache build *.egg-info
