#!/usr/bin/env bash
# What happens when things fail, and from many threads: every call to Vulkan and every third allocation fails in turn, also
# under AddressSanitizer; then threads under ThreadSanitizer. Minutes. The argument: only every so many-th of them (default 1).
set -euo pipefail
cd "$(dirname "$0")/.."

every=${1:-1}
PATH=$(realpath -ms "${VENV:-.venv}")/bin:$PATH
driver=$(find {/usr,/usr/local}/share/vulkan/icd.d /etc/vulkan/icd.d -name 'lvp_icd*.json' 2>/dev/null | head -1 || true)
export VK_DRIVER_FILES=$driver VK_ICD_FILENAMES=$driver LAPILLI_CACHE_DIR=
export LSAN_OPTIONS=suppressions=$PWD/native/tests/leaks.supp:print_suppressions=0
export TSAN_OPTIONS=suppressions=$PWD/native/tests/threads.supp

build() { # FOLDER OPTION TARGETS...
  local folder=$1 option=$2
  shift 2
  cmake -S native -B "$folder" -G Ninja -DLAPILLI_TESTS=ON "$option" -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS=-O1 >/dev/null
  cmake --build "$folder" --target "$@"
}

faults() { # FOLDER EVERY
  (cd "$1" && LD_LIBRARY_PATH=$PWD/tests/fault tests/test_faults "$2")
}

cmake -S native -B build/package -G Ninja -DLAPILLI_TESTS=ON -DCMAKE_BUILD_TYPE=Release >/dev/null # as test_native.sh
cmake --build build/package --target test_faults
faults build/package "$every"
build build/asan -DLAPILLI_ASAN=ON test_faults
faults build/asan $((3 * every))
build build/tsan -DLAPILLI_TSAN=ON test_threads test_cpp
build/tsan/tests/test_threads 20
build/tsan/tests/test_cpp
