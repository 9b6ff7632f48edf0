#!/usr/bin/env bash
# On each phone of tests/support/phones.py: operators, rows, dynamic sizes, types, states and models, and a line of what came out.
set -uo pipefail
cd "$(dirname "$0")/.."

PATH=$(realpath -ms "${VENV:-.venv}")/bin:$PATH
cmake -S native -B build/package -G Ninja -DLAPILLI_TESTS=ON -DCMAKE_BUILD_TYPE=Release >/dev/null
cmake --build build/package --target limits_layer >/dev/null || exit 1
failed=0
for phone in $(python tests/support/phones.py); do
  echo "» $phone"
  tools/test_python.sh phone "$phone" tests/conformance/test_{operators,row_results,dynamic,dtypes,conversions,int64,special_values,few_bindings}.py \
    tests/runtime/test_{requirements,state,runtime}.py tests/integration/test_{models,dynamic_models}.py "$@" || failed=1
done
exit $failed
