#!/usr/bin/env bash
# The player alone, with CMake and a C++ compiler: warnings are errors, its tests, the file reader under AddressSanitizer.
set -euo pipefail
cd "$(dirname "$0")/.."
