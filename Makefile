# `make demo` and `make test` do all their own set-up; see tools/setup.sh. VENV names another virtual environment.
VENV ?= .venv
PY := $(VENV)/bin/python
export VENV

.DEFAULT_GOAL := help
.PHONY: help demo setup-demo setup-test lint types native python poor test format bench clean

help: ## What there is to make
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  \1\t/' | expand -t 16

demo: setup-demo ## Compile EfficientNet-Lite0, save it, run it on two photos
	$(PY) examples/efficientnet_lite0.py

test: setup-test ## Lint, types, native tests, Python tests on two software devices
	$(MAKE) --no-print-directory lint types native python poor

setup-demo:
	@tools/setup.sh demo

setup-test:
	@tools/setup.sh test

lint: ## ruff
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: ## mypy --strict
	$(PY) -m mypy --strict src/lapilli

native: ## C++ with warnings as errors, ctest, the file reader under AddressSanitizer
	tools/test_native.sh

python: ## pytest on lavapipe with the validation layers
	tools/test_python.sh rich

poor: ## The tests marked poor_device on SwiftShader
	tools/test_python.sh poor

format: ## Format the Python code
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: setup-demo ## Time classifiers against torch on this machine
	$(PY) benchmarks/classifiers.py

clean: ## Remove builds, caches and the environment
	rm -rf .venv .venv-bare .cache build demo .mypy_cache .pytest_cache .ruff_cache
