#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs a build, moves it elsewhere, and uses it there as somebody would who never saw the source tree, which is hidden meanwhile:
# the program, and docs/examples/own_technique with find_package(tandem), right and with each of its bugs.
#
#   ci/check_install.sh [BUILD]    default build/cpu
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# expect STATUS TEXT COMMAND...: it ends with this status and says this.
expect() {
  local wanted=$1 text=$2 status=0 output
  shift 2
  output=$("$@" 2>&1) || status=$?
  if [[ $status != "$wanted" || $output != *"$text"* ]]; then
    printf '%s\n' "$output" | tail -n 30 >&2
    fail "'$*' ended with status $status instead of $wanted, or did not say '$text'"
  fi
}

# Every header that an installed one includes is installed, and nothing leads back.
check_files() {
  local missing
  missing=$(cd "$prefix/include/tandem" && grep -rhoE '^#include "[^"]+"' . | sort -u | cut -d'"' -f2 |
    while read -r header; do [[ -f $header ]] || echo "$header"; done)
  [[ -z $missing ]] || fail "headers that installed ones include are not installed: $missing"
  if grep -rl "$repository" "$prefix/lib"*/cmake "$prefix/include"; then fail "these files name the source tree"; fi
  if find "$prefix" -name '*_test*' | grep .; then fail "tests are installed"; fi
}

check_program() {
  local tandem=$prefix/bin/tandem golden=$prefix/share/tandem/golden/tiny
  expect 0 "tandem $version (" "$tandem" --version
  expect 0 "2 passed, 0 failed, 0 skipped" "$tandem" run --without-peak training/golden/tiny/ranks1/fp32 data_parallel/ranks2/accum1/fp32
  expect 0 "engine fp32 data 1       pass" "$tandem" golden "$golden" --precision fp32
  expect 0 gpt3-175b "$tandem" plan --model gpt3-175b --cluster dgx-a100 --gpus 1024
  expect 0 "" "$tandem" report "$prefix/share/tandem/baselines/epyc-zen5-2cores.json" --html report.html
  if command -v man >/dev/null; then expect 0 "measured steps per case" man -l -Tutf8 "$prefix/share/man/man1/tandem-run.1"; fi
}

check_example() {
  local own=$scratch/own/own_technique
  expect 0 "Build files" cmake -S "$prefix/share/tandem/examples/own_technique" -B "$scratch/own" -DCMAKE_PREFIX_PATH="$prefix" \
    -DCMAKE_CXX_FLAGS_RELEASE=-O0
  expect 0 "Built target own_technique" cmake --build "$scratch/own" -j "$num_jobs"
  expect 0 "6 passed, 0 failed, 0 skipped" "$own"
  expect 1 wte.weight "$own" all-reduce --with-bug off_by_one data_parallel/ranks2/accum1/fp32
  expect 1 wte.weight "$own" all-reduce --with-bug missing_hop data_parallel/ranks3/accum2/packed/fp32
  expect 1 gradient_bytes_on_the_wire "$own" all-reduce --with-bug wasteful data_parallel/ranks3/accum2/packed/fp32
  expect 1 calls_of_own_part "$own" all-reduce data_pipeline/ledger/epochs
  expect 0 "3 passed, 0 failed, 0 skipped" "$own" adamw
  expect 1 adamw_parameters "$own" adamw --with-bug bias_correction data_parallel/ranks1/accum1/fp32
}

use_installed() {
  prefix=$scratch/moved/prefix
  [[ ! -e $repository/CMakeLists.txt ]] || fail "the source tree is not hidden"
  cd "$scratch"
  check_files
  check_program
  check_example
}

version=$(sed -nE 's/^project\(tandem VERSION ([0-9.]+).*/\1/p' CMakeLists.txt)
build=$(realpath "${1:-build/cpu}")
[[ -x $build/tandem ]] || fail "$build/tandem is not there; build it first"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/moved" "$scratch/nothing"
cmake --install "$build" --prefix "$scratch/first" >"$scratch/install.log" 2>&1 || fail "$(tail -n 20 "$scratch/install.log")"
mv "$scratch/first" "$scratch/moved/prefix"

# What hides the tree: an empty folder over it, in a mount namespace of this check alone.
hiding=(unshare --mount)
((EUID == 0)) || hiding=(unshare --user --map-root-user --mount)
if ! "${hiding[@]}" mount --bind "$scratch/nothing" "$repository" 2>/dev/null; then
  echo "the source tree cannot be hidden here (unshare): not checked"
  exit "$skipped_status"
fi
export scratch version repository
export -f expect fail check_files check_program check_example use_installed
# shellcheck disable=SC2016  # expanded by the inner shell
"${hiding[@]}" bash -euo pipefail -c 'mount --bind "$scratch/nothing" "$repository" && use_installed'
echo "installed, moved and used without the source tree in $SECONDS s"
