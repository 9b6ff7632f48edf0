#!/usr/bin/env bash
# test_wheel.sh NAME WHEEL: installs a wheel of tools/wheels.sh into an empty environment, and runs what this machine can run of it:
#
#   manylinux   its Python package, arm64's under qemu: program files are read and, on lavapipe, run
#   musllinux   its player, by native/tools/wheel_probe.c and Debian's musl (arm64's under qemu): there is no Python for musl to be had here
#   windows     its player, by native/tools/wheel_probe.c under wine, if wine is there
#   macos       nothing: it is installed, and tools/check_wheel_contents.py has looked at the player
set -euo pipefail
cd "$(dirname "$0")/.."

name=$1 wheel=$(realpath "$2")
venv=$(realpath -ms "${VENV:-.venv}")
PATH=$venv/bin:$PATH
work=build/wheels/$name
here=$(find {/usr,/usr/local}/share/vulkan/icd.d /etc/vulkan/icd.d -name 'lvp_icd*.json' 2>/dev/null | head -1 || true)
export OMP_NUM_THREADS=1 LAPILLI_CACHE_DIR=$PWD/$work/cache GALLIVM_PERF=nopt
say() { printf '  %s\n' "$*"; }

rm -rf "$work/environment"
if [ "$name" = "manylinux-$(uname -m | sed s/aarch64/arm64/)" ]; then
  python -m venv --without-pip "$work/environment"
  python -m pip --python "$work/environment/bin/python" install -q "$wheel"
  printed=$(VK_DRIVER_FILES=$here VK_ICD_FILENAMES=$here "$work/environment/bin/python" tools/check_wheel.py)
  say "$printed"
  exit
fi

# pip looks for NumPy and cffi of that system as well. They come as wheels with older tags, too.
case $name in
manylinux-*) platforms=$(echo manylinux_2_{28,27,24,17}_ARCH manylinux2014_ARCH) ;;
musllinux-*) platforms=$(echo musllinux_1_{2,1}_ARCH) ;;
windows-*) platforms=win_amd64 ;;
macos-*) platforms=$(echo macosx_{14,13,12,11}_0_arm64) ;;
esac
version=3.11
if [ "$name" = manylinux-arm64 ]; then # Debian's Python for arm64
  tools/foreign_packages.sh arm64 .cache/arm64 mesa-vulkan-drivers libvulkan1 libstdc++6 python3 # as tools/test_arm64.sh
  root=$PWD/.cache/arm64/system
  interpreter=$(echo "$root"/usr/bin/python3.[0-9]*)
  version=${interpreter##*/python}
fi
case $name in *-arm64) arch=aarch64 debian=arm64 ;; *) arch=x86_64 debian=amd64 ;; esac
options=()
for platform in $platforms; do
  options+=(--platform "${platform/ARCH/$arch}")
done
python -m pip install -q --only-binary :all: --implementation cp --python-version "$version" "${options[@]}" --target "$work/environment" "$wheel"
say "$(du -sm "$work/environment" | cut -f1) MB installed: $(cd "$work/environment" && echo *.dist-info)"

tests=$work/files
rm -rf "$tests" && mkdir -p "$tests"
python -m zipfile -e tests/kept/picture-2.zip "$tests"
mv "$tests/program.lap" "$tests/good.lap"
head -c 5000 "$tests/good.lap" >"$tests/bad.lap"

# run_probe COMMAND...: what the probe has to print, by a program that runs it.
run_probe() {
  local printed
  printed=$("$@" "$tests/good.lap" "$tests/bad.lap" "$tests/none.lap" 2>"$work/probe.log" | tr -d '\r') || { cat "$work/probe.log" >&2; exit 1; }
  [[ $printed == "lapilli "*"described: methods"*"refused: "*"refused: "*"none.lap"*"devices: "* ]] || { echo "$printed" >&2; exit 1; }
  say "the player reads a file, and refuses damaged ones; ${printed##*$'\n'}"
}
probe() {
  python -m ziglang cc -target "$1" native/tools/wheel_probe.c -Inative/include "$2" -o "$work/probe${3:-}"
}

case $name in
manylinux-arm64)
  driver=/usr/share/vulkan/icd.d/lvp_icd.aarch64.json
  printed=$(PYTHONPATH=$work/environment qemu-aarch64-static -L "$root" -E VK_DRIVER_FILES=$driver -E VK_ICD_FILENAMES=$driver \
    "$interpreter" tools/check_wheel.py)
  say "$printed"
  ;;
musllinux-*)
  tools/foreign_packages.sh $debian ".cache/musl-$debian" musl
  probe "$arch-linux-musl" "$work/environment/lapilli/liblapilli.so"
  loader=$PWD/.cache/musl-$debian/system/lib/ld-musl-$arch.so.1
  emulator=()
  [ "$arch" = "$(uname -m)" ] || emulator=(qemu-$arch-static)
  run_probe "${emulator[@]}" "$loader" --library-path "$work/environment/lapilli" "$work/probe"
  ;;
windows-x86_64)
  command -v wine64 >/dev/null || PATH=$PATH:/usr/lib/wine
  if ! command -v wine64 >/dev/null; then
    say "not run: wine64 is not installed (apt install wine64)"
    exit
  fi
  probe x86_64-windows-gnu "$work/environment/lapilli/lapilli.dll" .exe
  cp "$work/environment/lapilli/lapilli.dll" "$work/"
  WINEPREFIX=$PWD/$work/wine WINEDEBUG=-all VK_DRIVER_FILES=$here VK_ICD_FILENAMES=$here run_probe wine64 "$work/probe.exe"
  ;;
macos-arm64) say "not run: nothing here runs programs of macOS" ;;
esac
