#!/usr/bin/env bash
# Random programs against torch on lavapipe, in two processes; arguments are those of tests/support/random_programs.py.
set -euo pipefail
cd "$(dirname "$0")/.."

driver=$(find {/usr,/usr/local}/share/vulkan/icd.d /etc/vulkan/icd.d -name "lvp_icd*.json" 2>/dev/null | head -1 || true)
export VK_DRIVER_FILES=$driver VK_ICD_FILENAMES=$driver
export XDG_CACHE_HOME=$PWD/.cache/test # not the user's kernels and pipelines
export LAPILLI_BINDING_SLACK=64        # what lies beyond a value is NaN, and not zero as lavapipe has it
export OMP_NUM_THREADS=1
mkdir -p "$XDG_CACHE_HOME"
exec "$(realpath -ms "${VENV:-.venv}")/bin/python" tests/support/random_programs.py --jobs 2 "$@"
