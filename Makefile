# `make train` trains a small GPT on four processes; `make test` checks everything. All first make .venv.

BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet install -c constraints.txt

# Without bytecode each worker, and each process that tests start, would compile all again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: attack chaos check docs frameworks help train test test-browser gpu verify-all clean

help:
	@echo "make train   train a small GPT with fully sharded data parallelism on four processes"
	@echo "make test    lint, types and all tests"
	@echo "make test-browser"
	@echo "             pages of the viewer in headless Chromium"
	@echo "make check   lint, types and the fast tests, for whoever edits"
	@echo "make frameworks"
	@echo "             the packages whose configuration code the tests call; make test does it too"
	@echo "make docs    a site of the pages of docs/, in build/site"
	@echo "make gpu     the tests and measurements that need a GPU"
	@echo "make verify-all"
	@echo "             every strategy and pair of strategies against one device, and all that the tests sample"
	@echo "make attack  10,000 random programs, right and wrong: each is refused, or trained against one device"
	@echo "make chaos   training runs killed 200 times, and disturbed otherwise, in half an hour"
	@echo "make clean   remove .venv and caches"

train: .venv/installed
	$(BIN)/shardlab train --strategy fsdp --ranks 4 --steps 200

# Types are checked by one of the tests, so that pyright runs beside the others.
test: .venv/installed .venv/frameworks/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pytest

# Needs a Chromium, such as Debian's: apt-get install chromium-headless-shell
test-browser: .venv/installed
	$(BIN)/python -m tests.browser.run

check: .venv/installed .venv/frameworks/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pytest -m 'not gpu and not slow and not thorough'

docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "build/site/index.html"

gpu: .venv/installed
	@$(BIN)/python -c "import sys, torch; torch.cuda.is_available() or sys.exit('make gpu: torch sees no GPU here')"
	$(BIN)/pytest -m gpu -n 0 -rs
	$(BIN)/python benchmarks/gpu.py
	@gpus=$$($(BIN)/python -c "import torch; print(torch.cuda.device_count())"); \
	if [ "$$gpus" -gt 1 ]; then $(BIN)/shardlab bench strategies --ranks "$$gpus"; fi

verify-all: .venv/installed
	$(BIN)/shardlab verify --all
	SHARDLAB_TESTS=thorough $(BIN)/pytest -m 'thorough or hypothesis'
	$(BIN)/python -m tests.support.long_run --mutants 5000 --programs 2000

attack: .venv/installed
	$(BIN)/python -m tests.attack.campaign --count 10000

chaos: .venv/installed
	$(BIN)/python -m tests.chaos.scenarios
	$(BIN)/python -m tests.chaos.campaign

# Made once, and again when the dependencies change. torch comes first, so that nothing else chooses its version.
.venv/installed: pyproject.toml constraints.txt
	@for python in python3.11 python3.12 python3.13 python3.14 python3 none; do \
	    "$$python" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2> /dev/null && break; \
	done; \
	if [ "$$python" = none ]; then echo "Shardlab needs Python 3.11 or later, with its venv module." >&2; exit 1; fi; \
	echo "Installing into .venv with $$("$$python" --version)"; \
	rm -rf .venv && "$$python" -m venv .venv
	$(PIP) torch
	$(PIP) -e '.[data,logging,search,test]'
	@touch $@

# Packages whose own configuration code parses what `plan --write` writes, each list in a folder of its own and without
# its dependencies: nothing else imports them.
frameworks: .venv/frameworks/installed

FRAMEWORKS := $(wildcard tests/frameworks/packages/*.txt)

.venv/frameworks/installed: .venv/installed $(FRAMEWORKS)
	@rm -rf .venv/frameworks
	@for list in $(FRAMEWORKS); do \
	    $(PIP) --no-deps --target .venv/frameworks/$$(basename $$list .txt) -r $$list || exit 1; \
	done
	@touch $@

# Only for `make docs`, so that nobody else waits for it.
.venv/docs: .venv/installed docs/site.py
	$(PIP) -e '.[docs]'
	$(BIN)/python docs/site.py
	@touch $@

clean:
	rm -rf .venv build src/*.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
