#!/usr/bin/env bash
# foreign_packages.sh ARCHITECTURE FOLDER PACKAGE...: Debian's packages of another architecture (or this one), with what they need, unpacked
# into FOLDER/system by an apt with a state of its own: this machine's packages are neither asked nor changed.
set -euo pipefail

architecture=$1 folder=$(realpath -m "$2")
shift 2
wanted="$*"
[ "$(cat "$folder/packages" 2>/dev/null)" != "$wanted" ] || exit 0
mkdir -p "$folder"/apt/{lists,archives}/partial "$folder/apt/none" "$folder/system"
: >"$folder/apt/status"
suite=$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian $suite main" >"$folder/apt/sources.list"
cat >"$folder/apt/apt.conf" <<END_CONF
APT::Architecture "$architecture";
APT::Architectures { "$architecture"; };
APT::Install-Recommends "0";
Dir::State "$folder/apt";
Dir::State::status "$folder/apt/status";
Dir::Cache "$folder/apt";
Dir::Etc::sourceparts "$folder/apt/none";
Dir::Etc::sourcelist "$folder/apt/sources.list";
END_CONF
export APT_CONFIG=$folder/apt/apt.conf
apt-get update -qq
apt-get install -qq -y --download-only "$@" >/dev/null
unset APT_CONFIG
for package in "$folder"/apt/archives/*.deb; do
  dpkg -x "$package" "$folder/system"
done
rm -rf "$folder/apt"
echo "$wanted" >"$folder/packages"
