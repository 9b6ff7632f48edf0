#!/usr/bin/env bash
# android_library.sh ABI FOLDER: the player and its natives for Java as an Android library, by zig (pip install ziglang), without
# Android's NDK. zig compiles for musl's C library; android/zig/bionic.c has what Android's lacks, and check_android_library.py
# verifies that what is left is in Android 8 (API 26).
set -euo pipefail
cd "$(dirname "$0")/.."

abi=$1 out=$2
venv=$(realpath -ms "${VENV:-.venv}")
case $abi in
arm64-v8a) target=aarch64-linux-musl ;;
x86_64) target=x86_64-linux-musl ;;
*) echo "The ABI is $abi; arm64-v8a and x86_64 are accepted. Others need Android's NDK: see docs/android.md" >&2 && exit 1 ;;
esac
zig() { "$venv/bin/python" -m ziglang "$@"; }
generated=build/package/generated # as tools/sizes.sh
flatbuffers=$(sed -n 's/^LAPILLI_FLATBUFFERS_INCLUDE:PATH=//p' build/package/CMakeCache.txt)
version=$(sed -n 's/^project(lapilli VERSION \([0-9.]*\).*/\1/p' native/CMakeLists.txt)
jdk=$(dirname "$(dirname "$(realpath "$(command -v javac)")")")
common=(-target "$target" -Os -fPIC -fvisibility=hidden -ffunction-sections -fdata-sections -femulated-tls -DNDEBUG -w)
flags=("${common[@]}" -std=c++20 -fvisibility-inlines-hidden "-DLAPILLI_VERSION=$version" -DLAPILLI_HAS_PROFILER=1 -DLAPILLI_HAS_JSON=1
  -DLAPILLI_HAS_STREAMS=1 -DLAPILLI_HAS_WRITER=1 -DLAPILLI_HAS_FIRST_RUN=1 -Inative/include -Inative/src -isystem "$generated" -isystem "$flatbuffers" -isystem "$jdk/include"
  -isystem "$jdk/include/linux")
mkdir -p "$out/objects"
mapfile -t sources < <(find native/src native/jni -name '*.cpp' -not -path '*/null/*' | sort)
newest=$(find native/src native/include "$generated" -name '*.h' -printf '%T@ %p\n' | sort -rn | sed -n '1s/^[^ ]* //p')
objects=()
for file in "${sources[@]}"; do
  object=$out/objects/$(echo "$file" | tr / -).o
  objects+=("$object")
  if [ ! -f "$object" ] || [ "$file" -nt "$object" ] || [ "$newest" -nt "$object" ]; then
    echo "$file $object"
  fi
done | xargs -r -P 2 -L 1 "$(realpath tools)/zig_compile.sh" "$venv/bin/python" "${flags[@]}"
objects=("$out"/objects/*.o)
zig cc "${common[@]}" -c android/zig/bionic.c -o "$out/bionic.o"
# Android has dlopen in libdl.so and functions of mathematics in libm.so: both must be named, though musl has all in one library.
echo >"$out/empty.c"
for name in libdl.so libm.so; do
  zig cc -target "$target" -shared -nostdlib -Wl,-soname,$name "$out/empty.c" -o "$out/$name"
done
zig c++ -target "$target" -shared -s -Wl,--gc-sections -Wl,-z,max-page-size=16384 -Wl,-soname,liblapilli.so \
  -Wl,--version-script=native/jni/exports.map "${objects[@]}" "$out/bionic.o" -Wl,--no-as-needed "$out/libdl.so" "$out/libm.so" \
  -o "$out/liblapilli.so" 2>"$out/link.log" || { tail -20 "$out/link.log" >&2; exit 1; }
