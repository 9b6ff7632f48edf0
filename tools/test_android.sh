#!/usr/bin/env bash
# The Java API on this machine's JVM and lavapipe: the natives built for this machine, programs made by Python, JUnit. `library`: by the
# natives that `make aar` has built for Android on x86-64, with names of Android's C library that this machine's lacks (android/tests/bionic.c).
set -euo pipefail
cd "$(dirname "$0")/.."
unset MAKEFLAGS # as tools/test_native.sh

venv=$(realpath -ms "${VENV:-.venv}")
PATH=$venv/bin:$PATH
driver=$(find {/usr,/usr/local}/share/vulkan/icd.d /etc/vulkan/icd.d -name 'lvp_icd*.json' 2>/dev/null | head -1 || true)
export VK_DRIVER_FILES=$driver VK_ICD_FILENAMES=$driver
export XDG_CACHE_HOME=$PWD/.cache/test OMP_NUM_THREADS=1
build=build/package # as tools/test_native.sh
out=build/android/host

(
  flock 9 # of the folder that tools/test_packages.sh builds in, too
  cmake -S native -B $build -G Ninja -DLAPILLI_JNI=ON -DCMAKE_BUILD_TYPE=Release >/dev/null
  cmake --build $build --target lapilli_jni >/dev/null
) 9>build/package.lock
tools/java_classes.sh $out
junit=/usr/share/java/junit4.jar:/usr/share/java/hamcrest-core.jar
classes=$out/lapilli:$out/pytorch:$out/stubs:$junit
mkdir -p $out/tests
javac --release 17 -Xlint:all -Werror -cp "$classes" -d $out/tests $(find android/tests -name '*.java')
"$venv/bin/python" android/tests/make_models.py $out/models
stdlib=.cache/kotlin/node_modules/kotlin-compiler/lib/kotlin-stdlib.jar
tools/kotlin_classes.sh "$classes" $out/kotlin $(find android/kotlin/src -name '*.kt')
tools/kotlin_classes.sh "$classes:$out/kotlin" $out/tests-kotlin android/kotlin/tests/*.kt
tests=$(find android/tests -name '*Test.java' -printf '%P\n' | sed 's/\.java$//; s,/,.,g' | sort)
library=$PWD/$build/jni/liblapilli.so
run=(java)
if [ "${1:-}" = library ]; then
  library=$PWD/build/android/x86_64/liblapilli.so system=$out/system
  mkdir -p $system
  cc -shared -fPIC -o $system/libbionic.so android/tests/bionic.c
  for name in libc libdl libm; do # Android's names of what this machine has in one library, or with a version
    cc -shared -fPIC -Wl,-soname,$name.so -Wl,--no-as-needed -o $system/$name.so -x c /dev/null -lm -ldl
  done
  run=(env "LD_PRELOAD=$PWD/$system/libbionic.so" "LD_LIBRARY_PATH=$PWD/$system" java)
fi
# shellcheck disable=SC2086 # names are words
exec "${run[@]}" -Xcheck:jni -ea -Xmx512m -Dorg.lapilli.library="$library" -Dmodels=$out/models -cp "$classes:$out/tests:$out/kotlin:$out/tests-kotlin:$stdlib" \
  org.junit.runner.JUnitCore $tests org.lapilli.ktx.KotlinTest
