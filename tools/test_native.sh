#!/usr/bin/env bash
# The player alone, with CMake and a C++ compiler: warnings are errors; its tests; and those of the file reader, which gets
# thousands of damaged files, of programs and streams without a driver, which hand memory out, and of what happens when calls
# fail, once more under AddressSanitizer, with char as it is on arm64; with LAPILLI_TEST_ALL those of streams on a driver and of
# C++, too. tools/test_failures.sh has more calls that fail.
set -euo pipefail
cd "$(dirname "$0")/.."
unset MAKEFLAGS # ninja cannot join the pool of make -j, and says so as an error

PATH=$(realpath -ms "${VENV:-.venv}")/bin:$PATH
driver=$(find {/usr,/usr/local}/share/vulkan/icd.d /etc/vulkan/icd.d -name 'lvp_icd*.json' 2>/dev/null | head -1 || true)
export VK_DRIVER_FILES=$driver VK_ICD_FILENAMES=$driver

build=build/package # where tools/setup.sh has built the player already
exec 9>$build.lock
flock 9 # others build in that folder, too
cmake -S native -B $build -G Ninja -DLAPILLI_TESTS=ON -DLAPILLI_TOOLS=ON -DCMAKE_BUILD_TYPE=Release >/dev/null
cmake --build $build
rm -f $build/tests/validation-*.log
ctest --test-dir $build -j 2 --output-on-failure
reports=$(cat $build/tests/validation-*.log 2>/dev/null || true)
if [ -n "$reports" ]; then
  echo "The Vulkan validation layers reported:" >&2
  echo "$reports" >&2
  exit 1
fi
exec 9>&-

cmake -S native -B build/asan -G Ninja -DLAPILLI_TESTS=ON -DLAPILLI_ASAN=ON -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS="-Og -funsigned-char" -DCMAKE_UNITY_BUILD=ON >/dev/null
sanitized="units reader null null_stream faults"
[ -z "${LAPILLI_TEST_ALL:-}" ] || sanitized+=" stream cpp cpp_null"
# shellcheck disable=SC2046,SC2086 # names are words
cmake --build build/asan --target $(printf 'test_%s ' $sanitized) make_corpus fuzz_reader fuzz_planner fuzz_spirv
ctest --test-dir build/asan -j 2 --output-on-failure -R "^(${sanitized// /|}|fuzz_(corpus|reader|planner|spirv))$"
