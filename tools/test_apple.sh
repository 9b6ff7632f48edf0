#!/usr/bin/env bash
# What can be checked for Apple without a machine of Apple's: docs/apple.md. Arguments are pytest's.
set -euo pipefail
cd "$(dirname "$0")/.."

tools/test_python.sh rich tests/apple "$@"
