#!/usr/bin/env bash
# What can be checked for Apple without a machine of Apple's: docs/apple.md. Arguments are pytest's.
set -euo pipefail
cd "$(dirname "$0")/.."

PATH=$(realpath -ms "${VENV:-.venv}")/bin:$PATH
cmake -S native -B build/package -G Ninja -DCMAKE_BUILD_TYPE=Release >/dev/null
cmake --build build/package --target lapilli >/dev/null
tools/apple_library.sh build/apple
python tools/check_apple_library.py build/apple/liblapilli.dylib
tools/test_python.sh rich tests/apple "$@"
