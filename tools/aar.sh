#!/usr/bin/env bash
# Android's package, without Android's NDK and SDK: build/android/lapilli.aar, with lapilli-pytorch.jar and lapilli-ktx.jar beside it.
set -euo pipefail
cd "$(dirname "$0")/.."

out=build/android
PATH=$(realpath -ms "${VENV:-.venv}")/bin:$PATH
cmake -S native -B build/package -G Ninja -DCMAKE_BUILD_TYPE=Release >/dev/null
cmake --build build/package --target lapilli_generated >/dev/null
libraries=()
for abi in arm64-v8a x86_64; do
  tools/android_library.sh $abi $out/$abi
  python tools/check_android_library.py $abi $out/$abi/liblapilli.so
  libraries+=("$abi=$out/$abi/liblapilli.so")
done
tools/java_classes.sh $out/classes
tools/kotlin_classes.sh $out/classes/lapilli $out/classes/kotlin $(find android/kotlin/src -name '*.kt')
jar --create --file $out/lapilli-ktx.jar -C $out/classes/kotlin .
python tools/write_aar.py $out/classes $out "${libraries[@]}"
