#!/usr/bin/env bash
# The Python tests under the Vulkan validation layers: `rich` on lavapipe, `poor` (those marked poor_device) on SwiftShader, `none`
# with no driver at all. `phone NAME`: those marked poor_device on lavapipe, as poor as that phone of tests/support/phones.py.
set -euo pipefail
cd "$(dirname "$0")/.."

kind=$1
shift
venv=$(realpath -ms "${VENV:-.venv}")
if [ "$kind" = poor ]; then
  driver=$PWD/.cache/swiftshader/icd.json
  [ $# -gt 0 ] || set -- $(grep -rl --include="test_*.py" poor_device tests | sort) # other files take long to import
  set -- -m poor_device "$@"
elif [ "$kind" = none ]; then
  driver=/nonexistent
else
  driver=$(find {/usr,/usr/local}/share/vulkan/icd.d /etc/vulkan/icd.d -name "lvp_icd*.json" 2>/dev/null | head -1 || true)
fi
export VK_DRIVER_FILES=$driver VK_ICD_FILENAMES=$driver
export XDG_CACHE_HOME=$PWD/.cache/test # not the user's kernels and pipelines
# Lavapipe compiles each kernel once and runs it a few times: without LLVM's passes that takes two thirds of the time. All cases have them.
[ -n "${LAPILLI_TEST_ALL:-}" ] || export GALLIVM_PERF=nopt
export OMP_NUM_THREADS=1 # several processes share the cores, and threads of torch wait by turning round
export LP_NUM_THREADS=1  # those of lavapipe take a twentieth of the processors' time
export LAPILLI_VALIDATION=1 LAPILLI_VALIDATION_LOG=$PWD/build/validation-$kind.log
if [ "$kind" = phone ]; then
  kind=phone-$1
  eval "$("$venv/bin/python" tests/support/phones.py "$1")"
  export LAPILLI_VALIDATION_LOG=$PWD/build/validation-$kind.log
  shift
  set -- -m poor_device "$@"
fi
bare=$venv-bare/bin/python
[ ! -x "$bare" ] || export LAPILLI_TEST_BARE_PYTHON=$bare
[ ! -x "$venv-player/bin/python" ] || export LAPILLI_TEST_PLAYER_PYTHON=$venv-player/bin/python
mkdir -p build "$XDG_CACHE_HOME"
: >"$LAPILLI_VALIDATION_LOG"
# Three on two cores: a fifth of the time of two goes by in waiting.
exec "$venv/bin/python" -m pytest -n "${LAPILLI_TEST_PROCESSES:-3}" --dist worksteal --durations=20 "$@"
