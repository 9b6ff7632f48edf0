#!/usr/bin/env bash
# zig_compile.sh PYTHON FLAG... SOURCE OBJECT
set -euo pipefail
python=$1 object=${*: -1} source=${*: -2:1}
exec "$python" -m ziglang c++ "${@:2:$#-3}" -c "$source" -o "$object"
