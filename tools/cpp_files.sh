#!/usr/bin/env bash
# The C++ and C files that clang-format keeps in shape, one a line; native/.clang-format-ignore names those that it leaves alone.
set -euo pipefail
cd "$(dirname "$0")/.."
find native \( -name '*.cpp' -o -name '*.h' -o -name '*.hpp' -o -name '*.c' \) | sort
