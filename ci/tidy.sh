#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# clang-tidy over the host code, with the flags of the cpu preset. Files may be named; default: every .cpp that is no test.
#
#   ci/tidy.sh [FILE...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

if ! command -v clang-tidy >/dev/null; then
  echo "clang-tidy is not installed; ci/setup.sh --all installs it"
  exit "$skipped_status"
fi
database=build/cpu/compile_commands.json
[[ -f $database ]] || cmake --preset cpu >/dev/null

files=("$@")
if ((${#files[@]} == 0)); then
  mapfile -t files < <(house_files | grep '\.cpp$' | grep -vE '_(test|bench)\.cpp$')
fi
# A file that this build does not compile has no flags.
mapfile -t known < <(for file in "${files[@]}"; do if grep -qF "/$file\"" "$database"; then echo "$file"; fi; done)
((${#known[@]})) || fail "none of the files is part of the build"

printf '%s\n' "${known[@]}" | xargs -P "$num_jobs" -n 4 clang-tidy -p build/cpu --quiet --extra-arg=-Wno-unknown-warning-option
echo "${#known[@]} files are tidy"
