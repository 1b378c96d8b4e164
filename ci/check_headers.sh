#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Fails where a header of the house does not compile alone. Headers of CUDA, NCCL and MPI code are left out where those are missing.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

compiler=${CXX:-g++}

compile_alone() {
  local header=$1
  local flags=(-std=c++20 -fsyntax-only -fopenmp-simd -Wall -Wextra -Wshadow -Wpedantic -Werror '-DTANDEM_SOURCE_DIR="."')
  # Through a file that includes it: compiling the header itself would warn of its #pragma once.
  "$compiler" "${flags[@]}" -I . -x c++ - <<<"#include \"$header\"" || {
    echo "$header does not compile alone"
    return 1
  }
}
export -f compile_alone
export compiler

mapfile -t headers < <(house_files | grep '\.h$' | xargs grep -LE '#include <(cuda|cublas|nccl|nvtx|mpi)')
# shellcheck disable=SC2016  # the inner shell expands $1
printf '%s\n' "${headers[@]}" | xargs -P "$num_jobs" -I '{}' bash -c 'compile_alone "$1"' _ '{}'
echo "${#headers[@]} headers compile alone"
