#!/usr/bin/env bash
# Wheels for other machines, made on this one by zig (pip install ziglang), which has the C library of each system: no container and no
# SDK. Those of a release are made by cibuildwheel (.github/workflows/wheels.yml).
#
#   tools/wheels.sh [NAME...]    manylinux-x86_64 manylinux-arm64 musllinux-x86_64 musllinux-arm64 windows-x86_64 macos-arm64; all
#
# Each is checked (tools/check_wheel_contents.py), installed into an empty environment and, where this machine can, run:
# tools/test_wheel.sh.
set -euo pipefail
cd "$(dirname "$0")/.."

PATH=$(realpath -ms "${VENV:-.venv}")/bin:$PATH
zig=$(python -c 'import pathlib, ziglang; print(pathlib.Path(ziglang.__file__).with_name("zig"))')
out=build/wheels
[ $# -gt 0 ] || set -- manylinux-x86_64 manylinux-arm64 musllinux-x86_64 musllinux-arm64 windows-x86_64 macos-arm64
for name in "$@"; do
  case $name in
  manylinux-x86_64) target=x86_64-linux-gnu.2.28 first=linux_x86_64 tag=manylinux_2_28_x86_64 ;;
  manylinux-arm64) target=aarch64-linux-gnu.2.28 first=linux_aarch64 tag=manylinux_2_28_aarch64 ;;
  musllinux-x86_64) target=x86_64-linux-musl first=linux_x86_64 tag=musllinux_1_2_x86_64 ;;
  musllinux-arm64) target=aarch64-linux-musl first=linux_aarch64 tag=musllinux_1_2_aarch64 ;;
  windows-x86_64) target=x86_64-windows-gnu first=win_amd64 tag= ;;
  macos-arm64) target=aarch64-macos.11.0 first=macosx_11_0_arm64 tag= ;;
  *) echo "The wheel is $name; see the head of tools/wheels.sh for those that are made here" >&2 && exit 1 ;;
  esac
  printf '» %s\n' "$name"
  rm -rf "$out/$name"
  mkdir -p "$out/$name/made"
  python -m pip wheel -q --no-build-isolation --no-deps -w "$out/$name/made" \
    --config-settings "build-dir=build/wheels-$name" --config-settings install.strip=false \
    --config-settings "cmake.define.CMAKE_TOOLCHAIN_FILE=$PWD/native/cmake/zig.cmake" \
    --config-settings "cmake.define.LAPILLI_ZIG=$zig" --config-settings "cmake.define.LAPILLI_ZIG_TARGET=$target" .
  python -m wheel tags --remove --platform-tag "$first" "$out/$name"/made/*.whl >/dev/null
  if [ -n "$tag" ]; then # auditwheel says which tag the symbols and libraries allow that it needs, and takes no other system's by name
    python -m auditwheel repair --plat auto --only-plat -w "$out/$name" "$out/$name"/made/*.whl 2>"$out/$name/auditwheel.log" ||
      { cat "$out/$name/auditwheel.log" >&2; exit 1; }
    allowed=$(basename "$out/$name"/*.whl .whl | sed 's/.*-none-//')
    [ "$(printf '%s\n' "$allowed" "$tag" | sort -V | tail -1)" = "$tag" ] || { echo "It needs $allowed, not $tag" >&2; exit 1; }
    python -m wheel tags --remove --platform-tag "$tag" "$out/$name"/*.whl >/dev/null
  else
    mv "$out/$name"/made/*.whl "$out/$name/"
  fi
  rm -r "$out/$name/made"
  python tools/check_wheel_contents.py "$out/$name"/*.whl
  tools/test_wheel.sh "$name" "$out/$name"/*.whl
done
