#!/usr/bin/env bash
# apple_library.sh FOLDER: the player as liblapilli.dylib for macOS on arm64, by zig (pip install ziglang), which brings along
# what is needed of Apple's libSystem. tools/check_apple_library.py reads what comes of it.
set -euo pipefail
cd "$(dirname "$0")/.."

out=$1
venv=$(realpath -ms "${VENV:-.venv}")
generated=build/package/generated # as tools/sizes.sh
flatbuffers=$(sed -n 's/^LAPILLI_FLATBUFFERS_INCLUDE:PATH=//p' build/package/CMakeCache.txt)
version=$(sed -n 's/^project(lapilli VERSION \([0-9.]*\).*/\1/p' native/CMakeLists.txt)
least=11.0 # the first macOS on arm64
target=aarch64-macos.$least
flags=(-target "$target" -Os -fvisibility=hidden -fvisibility-inlines-hidden -DNDEBUG -std=c++20 -Wall -Wextra -Wpedantic -Wconversion
  -Wshadow -Werror "-DLAPILLI_VERSION=$version" -DLAPILLI_HAS_PROFILER=1 -DLAPILLI_HAS_JSON=1 -DLAPILLI_HAS_STREAMS=1
  -DLAPILLI_HAS_WRITER=1 -DLAPILLI_HAS_FIRST_RUN=1 -Inative/include -Inative/src -isystem "$generated" -isystem "$flatbuffers")
mkdir -p "$out/objects"
mapfile -t sources < <(find native/src -name '*.cpp' -not -path '*/null/*' | sort)
newest=$(find native/src native/include "$generated" tools/apple_library.sh \( -name '*.h' -o -name '*.sh' \) -printf '%T@ %p\n' |
  sort -rn | sed -n '1s/^[^ ]* //p')
for file in "${sources[@]}"; do
  object=$out/objects/$(echo "$file" | tr / -).o
  if [ ! -f "$object" ] || [ "$file" -nt "$object" ] || [ "$newest" -nt "$object" ]; then
    echo "$file $object"
  fi
done >"$out/todo"
xargs -r -P 2 -L 1 "$(realpath tools)/zig_compile.sh" "$venv/bin/python" "${flags[@]}" <"$out/todo"
objects=("$out"/objects/*.o)
"$venv/bin/python" -m ziglang c++ -target "$target" -shared -Wl,-dead_strip -Wl,-x -install_name @rpath/liblapilli.dylib \
  -Wl,-compatibility_version,"${version%.*}.0" -Wl,-current_version,"$version" "${objects[@]}" -o "$out/liblapilli.dylib" \
  2>"$out/link.log" || { tail -20 "$out/link.log" >&2; exit 1; }
