#!/usr/bin/env bash
# The player and its tests for arm64, run on this machine under qemu: cross-compiled by Debian's g++, with arm64's C library, Vulkan
# loader and lavapipe from Debian's packages in .cache/arm64/system. Then programs that this machine compiles, against torch.
set -euo pipefail
cd "$(dirname "$0")/.."

PATH=$(realpath -ms "${VENV:-.venv}")/bin:$PATH
folder=$PWD/.cache/arm64
root=$folder/system
driver=/usr/share/vulkan/icd.d/lvp_icd.aarch64.json
here=$(find {/usr,/usr/local}/share/vulkan/icd.d /etc/vulkan/icd.d -name 'lvp_icd*.json' 2>/dev/null | head -1 || true)

tools/foreign_packages.sh arm64 "$folder" mesa-vulkan-drivers libvulkan1 libstdc++6 python3

cmake -S native -B build/arm64 -G Ninja -DCMAKE_TOOLCHAIN_FILE="$PWD/native/cmake/arm64-linux.cmake" -DLAPILLI_ARM64_ROOT="$root" \
  -DLAPILLI_TESTS=ON -DLAPILLI_TOOLS=ON -DCMAKE_BUILD_TYPE=Release >/dev/null
cmake --build build/arm64
VK_DRIVER_FILES=$driver VK_ICD_FILENAMES=$driver ctest --test-dir build/arm64 --output-on-failure

cmake -S native -B build/package -G Ninja -DLAPILLI_TOOLS=ON -DCMAKE_BUILD_TYPE=Release >/dev/null
cmake --build build/package --target lapilli-run >/dev/null
VK_DRIVER_FILES=$here VK_ICD_FILENAMES=$here OMP_NUM_THREADS=1 XDG_CACHE_HOME=$PWD/.cache/test python tools/arm64_models.py build/arm64 build/package \
  qemu-aarch64-static -L "$root" -E VK_DRIVER_FILES=$driver -E VK_ICD_FILENAMES=$driver
