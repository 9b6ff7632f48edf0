# `make demo` and `make test` do all their own set-up; see tools/setup.sh. VENV names another virtual environment.
VENV ?= .venv
PY := $(VENV)/bin/python
export VENV
# Each process would compile torch's Python again, for four seconds: pip leaves bytecode to the first import.
export PYTHONDONTWRITEBYTECODE =
# Measures on lavapipe, whatever GPU there is; ARGS are further arguments.
LAVAPIPE = $(shell find /usr/share/vulkan/icd.d -name 'lvp_icd*.json' 2>/dev/null | head -1)
MEASURE = VK_DRIVER_FILES=$(LAVAPIPE) $(PY)

.DEFAULT_GOAL := help
.PHONY: help archive packages sizes demo setup-demo setup-test setup-fuzz setup-tidy setup-zoo check lint types tidy native python poor test format bench cliffs quantization comparison runtimes performance random fuzz fuzz-native failures test-all opdb specials eager onnx zoo blockers clean aar android android-library apple arm64 phones setup-aar setup-apple setup-arm64 setup-wheels wheels setup-docs setup-browser browser docs

help: ## What there is to make
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  \1\t/' | expand -t 16

demo: setup-demo ## Compile EfficientNet-Lite0, save it, run it on two photos
	$(PY) examples/efficientnet_lite0.py

test: setup-test ## Lint, types, native tests, Python tests on two software devices
	$(MAKE) --no-print-directory -j2 android native lint types packages
	$(MAKE) --no-print-directory python poor random

setup-demo:
	@tools/setup.sh demo

setup-test:
	@tools/setup.sh test

setup-fuzz:
	@tools/setup.sh fuzz

setup-tidy:
	@tools/setup.sh tidy

setup-aar:
	@tools/setup.sh aar

setup-apple:
	@tools/setup.sh apple

setup-arm64:
	@tools/setup.sh arm64

setup-wheels:
	@tools/setup.sh wheels

setup-docs:
	@tools/setup.sh docs

setup-zoo:
	@tools/setup.sh zoo

setup-browser:
	@tools/setup.sh browser

check: setup-test lint types ## What needs no device: lint, types, the tests of tests/unit and tests/compiler (about a minute)
	tools/test_python.sh none tests/unit tests/compiler

lint: ## ruff, clang-format, and which stage or layer may import which
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	tools/cpp_files.sh | xargs $(VENV)/bin/clang-format --dry-run --Werror
	$(VENV)/bin/lint-imports --no-cache
	$(PY) tools/native_layers.py

types: ## mypy: strict for the package, nearly so for tests, tools and benchmarks
	$(PY) -m mypy

archive: setup-test ## The player's source archive: build/package/lapilli-VERSION.tar.gz, for CMake and a C++ compiler alone
	PATH=$(abspath $(VENV))/bin:$$PATH cmake -S native -B build/package -G Ninja -DCMAKE_BUILD_TYPE=Release >/dev/null
	PATH=$(abspath $(VENV))/bin:$$PATH cmake --build build/package --target lapilli_archive

packages: setup-test ## Consumers of the player's packages (CMake, pkg-config, FetchContent, Debian) are built and run
	tools/test_packages.sh

android: setup-test ## The Java API on this machine's JVM: JUnit, lavapipe, the natives built for this machine
	tools/test_android.sh

android-library: setup-test aar ## The same tests by the library that is built for Android on x86-64
	tools/test_android.sh library

apple: setup-apple ## For Apple: a dylib for macOS by zig, kernels in Metal's language, the Objective-C++, Swift and Ruby files (docs/apple.md)
	tools/test_apple.sh $(ARGS)

arm64: setup-arm64 ## The player and its tests for arm64 under qemu, and models against torch (five minutes)
	tools/test_arm64.sh

wheels: setup-wheels ## Wheels for Linux, Windows and macOS by zig, installed and run where this machine can; ARGS="manylinux-x86_64"
	tools/wheels.sh $(ARGS)

aar: setup-aar ## Android's package and classes in build/android, by zig: no NDK, no SDK
	tools/aar.sh

sizes: archive ## Bytes of the player, full and minimal (arm64 where ziglang is installed): docs/cpp.md
	tools/sizes.sh

tidy: setup-tidy ## clang-tidy: what looks like a fault in the player (two minutes; not in make lint, which is quick)
	tools/tidy.sh

native: ## C++ with warnings as errors, ctest, the file reader under AddressSanitizer
	tools/test_native.sh

python: ## pytest: tests/unit and tests/compiler with no driver, all others on lavapipe with the validation layers
	tools/test_python.sh none tests/unit tests/compiler
	tools/test_python.sh rich tests/runtime tests/conformance tests/integration tools/tests

poor: ## The tests marked poor_device on SwiftShader
	tools/test_python.sh poor

phones: setup-test ## Much of the same on devices as poor as phones, by a layer over lavapipe; ARGS are further arguments of pytest
	tools/test_phones.sh $(ARGS)

random: ## Random programs against torch: the same ones, some by kernels for GPUs, for a minute, and new ones for a third of one
	tools/random_programs.sh --seeds 0:$(if $(LAPILLI_TEST_ALL),18,4) --each 2
	tools/random_programs.sh --seeds 18:$(if $(LAPILLI_TEST_ALL),24,20) --each 2 --gpu-plans
	@tools/random_programs.sh --new --seconds $(if $(LAPILLI_TEST_ALL),60,20) --each 2 || { echo "A new seed failed: its number and what it found are above. To run it again: tools/random_programs.sh --seeds N:N+1 (both as numbers)" >&2; exit 1; }

format: ## Format Python and C++
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	tools/cpp_files.sh | xargs $(VENV)/bin/clang-format -i

bench: setup-demo ## Time classifiers against torch on this machine
	$(PY) benchmarks/classifiers.py

cliffs: setup-test ## Calls that are much slower than their neighbours, on lavapipe; ARGS="--dtype float16 --only attention"
	$(MEASURE) tools/cliffs.py $(ARGS)

quantization: setup-test ## Every way to quantize a model, on lavapipe: the table of docs/quantization.md; ARGS="--only eager"
	$(MEASURE) tools/quantization.py $(ARGS)

comparison: setup-demo ## Measure Lapilli beside other ways of running PyTorch on Vulkan: docs/comparison.md
	PYTHONPATH=benchmarks $(MEASURE) -m comparison $(ARGS)

runtimes: setup-test ## Measure Lapilli beside onnxruntime, ncnn, ExecuTorch, tinygrad and MLX, on lavapipe: docs/runtimes.md
	PYTHONPATH=benchmarks $(MEASURE) -m runtimes $(ARGS)

performance: setup-demo ## Measure Lapilli beside torch, table by table, on lavapipe: docs/performance.md; ARGS="products attention"
	PYTHONPATH=benchmarks:tools $(MEASURE) -m performance $(ARGS)

opdb: setup-test ## Measure every entry of PyTorch's operator tests (hours; goes on where it stopped): docs/operators.md
	$(MEASURE) tools/opdb.py --jobs 2 $(ARGS)

specials: setup-test ## NaN and infinities in every entry of PyTorch's operator tests (half an hour)
	$(MEASURE) tools/special_operators.py $(ARGS)

fuzz: setup-test ## Random programs against torch, and damaged files (fuzz-native), for SECONDS (600) each
	tools/random_programs.sh --new --seconds $(or $(SECONDS),600) --each 3 $(ARGS)
	$(MAKE) --no-print-directory fuzz-native SECONDS=$(or $(SECONDS),600)

fuzz-native: setup-fuzz ## Damaged files by libFuzzer, SECONDS (120) for each of four targets
	tools/fuzz_native.sh $(or $(SECONDS),120)

test-all: export LAPILLI_TEST_ALL=1
test-all: setup-browser docs test android-library tidy fuzz-native failures ## make test with all cases, clang-tidy, two minutes of each fuzz target, and every failure that can be had

failures: setup-test ## Every call to Vulkan and every third allocation fails in turn; threads under ThreadSanitizer
	tools/test_failures.sh

eager: setup-test ## Measure PyTorch's operator tests on the vulkan device (half an hour; goes on where it stopped): docs/eager_operators.md
	$(MEASURE) tools/eager.py --jobs 2 $(ARGS)
	$(MEASURE) tools/eager.py --strict --jobs 2 $(ARGS)

onnx: setup-test ## The ONNX standard's tests of operators on lavapipe, all of them (an hour; goes on where it stopped): docs/onnx_nodes.md
	$(MEASURE) tools/onnx_nodes.py $(ARGS)

zoo: setup-zoo ## Measure 280 models (hours; goes on where it stopped): docs/models.md
	$(MEASURE) tools/zoo.py --jobs 2 $(ARGS)

blockers: ## What stops most of what `make opdb` and `make zoo` have measured so far
	$(PY) tools/blockers.py

browser: setup-test setup-browser docs ## The page of `lapilli inspect --html` and the site's pages in a headless Chromium
	LAPILLI_TEST_ALL=1 tools/test_python.sh rich tests/integration/test_pages.py

docs: setup-docs ## The site: build/site/index.html. Links that lead nowhere and pages left out are errors
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build

clean: ## Remove builds, caches and the environment
	rm -rf .venv .venv-bare .venv-player .cache build demo .mypy_cache .pytest_cache .ruff_cache
