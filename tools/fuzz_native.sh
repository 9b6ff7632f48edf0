#!/usr/bin/env bash
# Damaged files by libFuzzer, under sanitizers: fuzz_native.sh [SECONDS of each target, 120] [TARGETS: reader planner spirv run].
# What was found on the way stays in build/fuzz/found/TARGET, and a failure in build/fuzz/failures.
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=${1:-120}
shift || true
targets=${*:-reader planner spirv run}
PATH=$(realpath -ms "${VENV:-.venv}")/bin:$PATH
driver=$(find {/usr,/usr/local}/share/vulkan/icd.d /etc/vulkan/icd.d -name 'lvp_icd*.json' 2>/dev/null | head -1 || true)
export VK_DRIVER_FILES=$driver VK_ICD_FILENAMES=$driver

cmake -S native -B build/fuzz -G Ninja -DLAPILLI_TESTS=ON -DLAPILLI_FUZZ=ON -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS=-O1 \
  -DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++ >/dev/null
cmake --build build/fuzz --target make_corpus $(printf 'fuzz_%s ' $targets)
build/fuzz/fuzz/make_corpus build/fuzz/corpus
mkdir -p build/fuzz/failures
export ASAN_OPTIONS=detect_leaks=0 # the driver keeps memory until the end
for name in $targets; do
  seeds=files
  [ "$name" != spirv ] || seeds=kernels
  mkdir -p "build/fuzz/found/$name"
  echo "» $name, $seconds s"
  "build/fuzz/fuzz/fuzz_$name" -max_total_time="$seconds" -max_len=65536 -timeout=60 -rss_limit_mb=6000 -print_final_stats=1 \
    -verbosity=0 -artifact_prefix="build/fuzz/failures/$name-" "build/fuzz/found/$name" "build/fuzz/corpus/$seeds" 2>&1 |
    grep -vE '^(INFO|stat::(peak|new|slowest|average))' || { echo "see build/fuzz/failures" >&2; exit 1; }
done
