#!/usr/bin/env bash
# What others build with: the source archive, an installed shared and static player (CMake's find_package, pkg-config), FetchContent
# with parts left out, and the Debian package. Each consumer is built and run on lavapipe. KEEP names a folder to work in and keep.
set -euo pipefail
cd "$(dirname "$0")/.."
unset MAKEFLAGS # as tools/test_native.sh

PATH=$(realpath -ms "${VENV:-.venv}")/bin:$PATH
cmake=${CMAKE:-cmake}
driver=$(find {/usr,/usr/local}/share/vulkan/icd.d /etc/vulkan/icd.d -name 'lvp_icd*.json' 2>/dev/null | head -1 || true)
export VK_DRIVER_FILES=$driver VK_ICD_FILENAMES=$driver
work=${KEEP:-$(mktemp -d)}
[ -n "${KEEP:-}" ] || trap 'rm -rf "$work"' EXIT
mkdir -p "$work"
export LAPILLI_CACHE_DIR=$work/cache

say() { printf '» %s\n' "$*"; }

(
  flock 9 # of the folder that tools/test_android.sh builds in, too
  cmake -S native -B build/package -G Ninja -DLAPILLI_TESTS=ON -DLAPILLI_TOOLS=ON -DCMAKE_BUILD_TYPE=Release >/dev/null # as test_native.sh
  cmake --build build/package --target lapilli_archive make_sample >/dev/null
) 9>build/package.lock
archive=$(realpath build/package/lapilli-*.tar.gz)
build/package/tests/make_sample "$work/sample.lap"
say "$(basename "$archive"), $(stat -c %s "$archive") bytes"
tar -xzf "$archive" -C "$work"
source=$(echo "$work"/lapilli-*/)

# No Python, flatc or registry: the archive alone, as a C++ compiler and CMake of any kind have it. Both kinds of library come from one
# folder, whose objects are the same.
alone=(env -i PATH=/usr/bin:/bin VK_DRIVER_FILES="$driver" LAPILLI_CACHE_DIR="$LAPILLI_CACHE_DIR" HOME="$work")
for kind in ON OFF; do
  say "BUILD_SHARED_LIBS=$kind"
  "${alone[@]}" "$(command -v "$cmake")" -S "$source" -B "$work/build" -DBUILD_SHARED_LIBS=$kind -DCMAKE_BUILD_TYPE=Debug -DCMAKE_UNITY_BUILD=ON \
    -DCMAKE_INSTALL_PREFIX="$work/installed-$kind" -DCMAKE_INSTALL_LIBDIR=lib >/dev/null
  "${alone[@]}" "$(command -v "$cmake")" --build "$work/build" -j 2 >/dev/null
  "${alone[@]}" "$(command -v "$cmake")" --install "$work/build" >/dev/null
  mv "$work/installed-$kind" "$work/moved-$kind" # a package may be moved

  "$cmake" -S native/examples/cpp -B "$work/find-$kind" -DCMAKE_PREFIX_PATH="$work/moved-$kind" >/dev/null
  "$cmake" --build "$work/find-$kind" >/dev/null
  "$work/find-$kind/tutorial" "$work/sample.lap"

  flags=$(PKG_CONFIG_PATH=$work/moved-$kind/lib/pkgconfig pkg-config --cflags --libs lapilli)
  # shellcheck disable=SC2086 # flags are words
  g++ -std=c++17 native/examples/cpp/tutorial.cpp -o "$work/tutorial-$kind" $flags -Wl,-rpath,"$work/moved-$kind/lib"
  "$work/tutorial-$kind" "$work/sample.lap"
  # shellcheck disable=SC2086
  gcc -std=c11 native/examples/c/classify.c -o "$work/classify-$kind" $flags -Wl,-rpath,"$work/moved-$kind/lib"
  "$work/classify-$kind" "$work/sample.lap" >/dev/null
  "$work/moved-$kind/bin/lapilli-run" "$work/sample.lap" --list
done

say "FetchContent, Vulkan linked, without profiler and JSON"
linked=(-DLAPILLI_LOADER=OFF)
found=$(PATH=$PATH:/sbin:/usr/sbin ldconfig -p | grep -m1 -o '/.*libvulkan\.so\.1$' || true)
[ -z "$found" ] || linked+=(-DLAPILLI_VULKAN_LIBRARY="$found")
"$cmake" -S native/examples/cpp -B "$work/fetch" -DLAPILLI_ARCHIVE="$archive" -DBUILD_SHARED_LIBS=OFF "${linked[@]}" \
  -DLAPILLI_PROFILER=OFF -DLAPILLI_JSON=OFF -DCMAKE_BUILD_TYPE=Debug -DCMAKE_UNITY_BUILD=ON >/dev/null 2>"$work/fetch.log" || { cat "$work/fetch.log"; exit 1; }
"$cmake" --build "$work/fetch" -j 2 >/dev/null
"$work/fetch/tutorial" "$work/sample.lap"

say "Debian package"
(cd "$work/build" && "${alone[@]}" "$(dirname "$(command -v "$cmake")")/cpack" -G DEB >/dev/null)
contents=$(dpkg-deb --contents "$work"/build/lapilli_*.deb)
for file in lib/liblapilli.a include/lapilli.h include/lapilli.hpp bin/lapilli-run bin/lapilli-bench pkgconfig/lapilli.pc lapilliConfig.cmake; do
  [[ $contents == *"$file"* ]] || { echo "The Debian package has no $file" >&2; exit 1; }
done
dpkg-deb --field "$work"/build/lapilli_*.deb Package Version Architecture Depends
