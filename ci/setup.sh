#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what tandem needs on Debian 12, and nothing that is there already.
#
#   ci/setup.sh --minimal   to build and run the program
#   ci/setup.sh             and its tests and checks (default)
#   ci/setup.sh --all       and what nightly uses: static analysis, an object store, a browser
#
# Works as root or with sudo. Prints one line; the output of apt is shown only when it fails.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

program=(g++ cmake ninja-build libfmt-dev nlohmann-json3-dev rapidjson-dev libcereal-dev libcli11-dev libxxhash-dev libdnnl-dev
  python3)
tests=(libgtest-dev libbenchmark-dev libopenblas-dev libopenmpi-dev openmpi-bin libcurl4-openssl-dev libpugixml-dev
  libsentencepiece-dev libboost-context-dev libcpp-httplib-dev libssl-dev prometheus-cpp-dev pkg-config ccache mold clang-format shellcheck gnuplot-nox
  protobuf-compiler)
nightly=(libsimgrid-dev clang-tidy ceph-mon ceph-osd ceph-common radosgw curl chromium chromium-driver python3-selenium
  clang libclang-rt-14-dev python3-clang-14 slurmctld slurmd slurm-client munge)

case ${1:-} in
  --minimal) wanted=("${program[@]}") ;;
  --all) wanted=("${program[@]}" "${tests[@]}" "${nightly[@]}") ;;
  '') wanted=("${program[@]}" "${tests[@]}") ;;
  *) fail "unknown option '$1'; use --minimal, --all or none" ;;
esac

command -v apt-get >/dev/null || fail "apt-get is not here; install the equivalents of: ${wanted[*]}"

missing=()
for package in "${wanted[@]}"; do
  # A file test is not enough: a package may be configured halfway.
  status=$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null || true)
  [[ $status == installed ]] || missing+=("$package")
done

if ((${#missing[@]} == 0)); then
  echo "setup: all ${#wanted[@]} packages are installed"
  exit 0
fi

as_root=()
if ((EUID != 0)); then
  command -v sudo >/dev/null || fail "run as root, or install sudo; missing packages: ${missing[*]}"
  as_root=(sudo)
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
install_missing() {
  "${as_root[@]}" apt-get update -qq &&
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"
}
if ! install_missing >"$log" 2>&1; then
  tail -n 20 "$log" >&2
  fail "apt-get could not install: ${missing[*]}"
fi
echo "setup: installed ${#missing[@]} packages in $SECONDS s: ${missing[*]}"
