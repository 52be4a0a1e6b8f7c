# Two commands on a fresh machine: `make demo` and `make test` set up all they need in .venv and run.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python

# Compiled modules are kept: the tests start hundreds of processes, and each would compile the whole package again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup devel demo demo-cluster test quick soak mutants check fmt lint types sbom audit clean-root docs docs-site bench lab serve sim clean screenshots

help:  ## What there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 10

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[plots,onnx,ocr]'
	@touch $@

$(VENV)/.tested: $(VENV)/.ready
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[dev,bench,access,postgres,otel,grpc,web,brokers,sources,clients,chart]'
	@touch $@

setup: $(VENV)/.ready  ## Virtual environment for running things
devel: $(VENV)/.tested  ## The same with all that tests and benchmarks need

demo: setup  ## Serve the OCR pipeline, load it at a rising rate, plot what happened
	$(PY) examples/ocr/demo.py

demo-cluster: setup  ## Three agents on this machine: one is killed under load, one is drained, and nothing is lost
	$(PY) examples/cluster/demo.py

# A third of their time tests wait, for processes that they have started: three at once keep two cores busy.
test: devel  ## All tests (those that need a GPU skip without one), on two cores
	$(PY) -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder

quick: devel  ## Tests that start no process, in a minute: core, planner, policies, sdk, asl, sim, predict ...
	$(PY) -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --hypothesis-profile quick -m "not live and not slow and not published"

soak: devel  ## A hundred thousand worlds of the controller, and as many of whole servers, from their seeds (hours)
	$(PY) -m tests.soak core 1000:101000 --jobs $$(nproc)
	$(PY) -m tests.soak server 1000:101000 --jobs $$(nproc)

mutants: devel  ## Break the code in a hundred places by hand, one at a time: the tests named beside each must notice
	$(PY) -m tests.mutants

check: fmt lint types test docs sbom audit  ## What CI runs

fmt: devel
	$(VENV)/bin/ruff format --check .

lint: devel
	$(VENV)/bin/ruff check .

types: devel
	$(VENV)/bin/mypy

sbom: devel  ## What is installed, as CycloneDX: out/sbom.json
	$(PY) scripts/supply_chain.py sbom out/sbom.json

audit: devel  ## Known vulnerabilities of what is installed; skipped where the registry cannot be reached
	$(PY) scripts/supply_chain.py audit

docs: devel  ## Every block of code in README and docs runs, every command and policy is documented
	$(PY) -m pytest -q tests/test_docs.py

docs-site: $(VENV)/.site  ## The documentation as a site, in out/site
	$(VENV)/bin/mkdocs build --strict --quiet
	@echo "out/site/index.html"

$(VENV)/.site: $(VENV)/.ready
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[site]'
	@touch $@

screenshots: devel  ## Pictures of the console from a real run, for the documentation (needs Chromium)
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[browser]'
	$(PY) -m benchmarks.console.screenshots

clean-root: devel  ## The steps of the Dockerfile in a clean Debian, without a container runtime (needs root, debootstrap and a network)
	LAMINA_CLEAN_ROOT=1 $(PY) -m pytest -q tests/deploy/test_images.py

bench: devel  ## Speed of our own code, as ratios against floors in the same run
	$(PY) -m benchmarks

lab: setup  ## Run all experiments (20 minutes on 16 cores), then gather them into results/lab/report.html and report.md
	benchmarks/lab_all.sh

serve: setup  ## Serve the OCR example on http://127.0.0.1:8700
	$(VENV)/bin/lamina serve examples/ocr/app.py

sim: setup  ## Simulate the quickstart scenario
	$(VENV)/bin/lamina sim scenarios/quickstart.toml

clean:
	rm -rf $(VENV) out .mypy_cache .ruff_cache .pytest_cache .hypothesis
