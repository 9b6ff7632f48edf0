#!/usr/bin/env bash
# Bytes of the player, full and minimal, for Markdown: stripped shared libraries, optimized for size. For this machine by g++; for arm64
# Linux by Debian's cross compiler (tools/setup.sh arm64), and by zig (pip install ziglang), which brings its own C and C++ library. g++
# gets what LAPILLI_SMALL asks for in native/CMakeLists.txt. Made from a build's generated headers.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=$(realpath -ms "${VENV:-.venv}")
generated=build/package/generated
flatbuffers=$(sed -n 's/^LAPILLI_FLATBUFFERS_INCLUDE:PATH=//p' build/package/CMakeCache.txt)
flags=(-std=c++20 -Os -fPIC -fvisibility=hidden -fvisibility-inlines-hidden -ffunction-sections -fdata-sections -DNDEBUG
  -DLAPILLI_VERSION=0.1.0 -w -Inative/include -Inative/src -isystem "$generated" -isystem "$flatbuffers")
full=(-DLAPILLI_HAS_PROFILER=1 -DLAPILLI_HAS_JSON=1 -DLAPILLI_HAS_STREAMS=1 -DLAPILLI_HAS_WRITER=1 -DLAPILLI_HAS_FIRST_RUN=1)
minimal=(-DLAPILLI_HAS_PROFILER=0 -DLAPILLI_HAS_JSON=0 -DLAPILLI_HAS_STREAMS=0 -DLAPILLI_HAS_WRITER=0 -DLAPILLI_HAS_FIRST_RUN=0)
mapfile -t sources < <(find native/src -name '*.cpp' -not -path '*/null/*' | sort; echo native/cmake/quiet_terminate.cpp)

library() { # NAME LINK... -- COMPILER...: the bytes of the full and the minimal library
  local name=$1 link=() folder at
  at=build/sizes/$(echo "$1" | tr -d ', +')
  shift
  while [ "$1" != -- ]; do
    link+=("$1")
    shift
  done
  shift
  for kind in full minimal; do
    folder=$at/$kind
    mkdir -p "$folder"
    declare -n parts=$kind
    for file in "${sources[@]}"; do
      local object
      object=$folder/$(echo "$file" | tr / -).o
      if [ $kind = minimal ] && ! grep -qE '"(core/(program|stream)|api/api)\.h"' "$file"; then
        cp "$at/full/$(basename "$object")" "$object" # the parts make no difference to it
      elif [ ! -f "$object" ] || [ "$file" -nt "$object" ]; then
        "$@" "${flags[@]}" "${parts[@]}" -c "$file" -o "$object"
      fi
    done
    "$@" -shared -s -Wl,--gc-sections -Wl,--version-script=native/src/exports.map "${link[@]}" "$folder"/*.o -o "$folder/liblapilli.so" \
      2>"$folder/log" || { tail -5 "$folder/log" >&2; exit 1; } # zig builds its library, with many warnings
  done
  printf '| %s | %s | %s |\n' "$name" "$(stat -c %s "$at/full/liblapilli.so")" "$(stat -c %s "$at/minimal/liblapilli.so")"
}

echo "| | full, bytes | minimal, bytes |"
echo "|---|---|---|"
small=(-flto=auto -fno-fat-lto-objects -fno-asynchronous-unwind-tables)
[ -n "${ONLY_ARM64:-}" ] || library x86-64 -static-libstdc++ -static-libgcc -lpthread -ldl -- g++ "${small[@]}"
if command -v aarch64-linux-gnu-g++ >/dev/null; then
  library "arm64, g++" -static-libstdc++ -static-libgcc -Wl,-z,max-page-size=16384 -- aarch64-linux-gnu-g++ "${small[@]}"
fi
if "$venv/bin/python" -c 'import ziglang' 2>/dev/null; then
  library "arm64, zig" -- "$venv/bin/python" -m ziglang c++ -target aarch64-linux-musl
fi
