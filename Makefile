# Only Python >= 3.11 and make are assumed. The venv is made once and again when its inputs change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test soak lint bench schemas clean

demo: $(READY)
	@rm -rf trajstore-demo
	@$(BIN)/trajstore demo trajstore-demo
	@echo "(trajstore is $(BIN)/trajstore here; 'source $(BIN)/activate' puts it on your path)"

test: $(READY) lint
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

# The long form: many more processes, kills and commits, on disk and on S3, and a wheel installed from an index.
soak: $(READY)
	TRAJSTORE_SOAK=1 $(BIN)/python -m pytest tests/faults tests/test_wheel.py -rP --durations=10

lint: $(READY)
	$(BIN)/ruff check trajstore tests
	$(BIN)/ruff format --check trajstore tests
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	@$(BIN)/python -m pip install -qq -c constraints.txt -e '.[bench]'
	@for bench in codec table table_size layouts loader query buffer ilql importers replay; do \
	    $(BIN)/python tests/bench/$$bench.py || exit 1; done

schemas: $(READY)
	$(BIN)/python -c 'import pathlib, trajstore.schema; trajstore.schema.write(pathlib.Path("schemas"))'

clean:
	rm -rf $(VENV) trajstore-demo trajstore-demo-report.html dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(READY): pyproject.toml constraints.txt trajstore/layouts/_kernel.c
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "trajstore needs Python 3.11 or newer, this is " + sys.version)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing trajstore and what it needs into $(VENV) (once)"
	@$(BIN)/python -m pip install -qq -c constraints.txt -e '.[dev]'
	@touch $@
