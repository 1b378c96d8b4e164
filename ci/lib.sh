# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# What the scripts of this folder share. Sourced; changes into the root of the source tree.

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$repository" || exit 2

# A check that cannot run here ends with this status; its last line of output is the reason.
skipped_status=77
export num_jobs
num_jobs=$(nproc)

say() { printf '\n== %s\n' "$*"; }

fail() {
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
  exit 2
}

# Freshly touched pages are slow on virtual machines: from glibc 2.35 on, malloc asks for huge ones when told to.
use_huge_pages() {
  local version
  version=$(getconf GNU_LIBC_VERSION 2>/dev/null | sed 's/^glibc //')
  if [[ -n $version ]] && printf '2.35\n%s\n' "$version" | sort -VC; then
    export GLIBC_TUNABLES=glibc.malloc.hugetlb=1
  fi
}

# Every C++ and CUDA file of the house, one a line.
house_files() {
  local folder
  for folder in core kernels reference optimized harness suites cli; do
    find "$folder" -type f \( -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \)
  done | LC_ALL=C sort
}

# start_checks FOLDER: where run_check keeps its logs, and its list for count_tests.py.
start_checks() {
  check_folder=$1
  rm -rf "$check_folder"
  mkdir -p "$check_folder"
  : >"$check_folder/checks.tsv"
}

# run_check NAME COMMAND...: runs it, prints one line (and the end of its output where it failed), notes the outcome. Always
# succeeds, so that one broken check does not hide the others; count_tests.py gives the verdict.
run_check() {
  local name=$1 status=0 outcome reason begin=$SECONDS
  shift
  local log=$check_folder/${name//[^A-Za-z0-9_.-]/_}.log
  ("$@") >"$log" 2>&1 || status=$?  # a function may end with `exit`: that is the end of the check alone
  reason=$(tail -n 1 "$log" | tr '\t' ' ')
  case $status in
    0) outcome=passed ;;
    "$skipped_status") outcome=skipped ;;
    *) outcome=failed reason="exit status $status; see $log" ;;
  esac
  printf '%s\t%s\t%s\n' "$name" "$outcome" "$reason" >>"$check_folder/checks.tsv"
  printf '%-8s %-28s %4d s' "$outcome" "$name" $((SECONDS - begin))
  [[ $outcome == skipped ]] && printf '  %s' "$reason"
  printf '\n'
  if [[ $outcome == failed ]]; then tail -n 40 "$log" | sed 's/^/    /'; fi
}
