#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Fails where clang-format would change a file. Versions lay out code differently, so that of Debian 12 decides.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

wanted=14
formatter=$(command -v clang-format-$wanted || command -v clang-format || true)
if [[ -z $formatter ]]; then
  echo "clang-format is not installed"
  exit "$skipped_status"
fi
version=$("$formatter" --version | sed -E 's/.*version ([0-9]+).*/\1/')
if [[ $version != "$wanted" ]]; then
  echo "clang-format $wanted decides the layout; found version $version"
  exit "$skipped_status"
fi
house_files | xargs -P "$num_jobs" -n 20 "$formatter" --dry-run -Werror
echo "$(house_files | wc -l) files are formatted"
