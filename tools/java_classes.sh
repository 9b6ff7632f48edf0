#!/usr/bin/env bash
# Compiles the Java API to FOLDER/lapilli and FOLDER/pytorch, for Android's API 26 (Java 8), against stubs of what it uses of Android.
set -euo pipefail
cd "$(dirname "$0")/.."

out=$1
rm -rf "$out"/{stubs,lapilli,pytorch}
mkdir -p "$out"/{stubs,lapilli,pytorch}
options=(--release 8 -g:source,lines -Xlint:all,-options -Werror)
mapfile -t stubs < <(find android/stubs -name '*.java' | sort)
mapfile -t lapilli < <(find android/lapilli/src/main/java -name '*.java' | sort)
mapfile -t pytorch < <(find android/pytorch/src/main/java -name '*.java' | sort)
javac "${options[@]}" -d "$out/stubs" "${stubs[@]}"
javac "${options[@]}" -cp "$out/stubs" -d "$out/lapilli" "${lapilli[@]}"
javac "${options[@]}" -cp "$out/stubs:$out/lapilli" -d "$out/pytorch" "${pytorch[@]}"
