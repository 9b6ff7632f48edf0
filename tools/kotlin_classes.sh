#!/usr/bin/env bash
# Compiles Kotlin: kotlin_classes.sh CLASSPATH OUT FILE..., by the compiler of npm that tools/setup.sh has put into .cache/kotlin.
set -euo pipefail
cd "$(dirname "$0")/.."

classpath=$1 out=$2
shift 2
rm -rf "$out"
mkdir -p "$out"
bash .cache/kotlin/node_modules/kotlin-compiler/bin/kotlinc -jvm-target 1.8 -Werror -cp "$classpath" -d "$out" "$@"
