#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Checks the scripts: shellcheck for the shell's, compilation for Python's.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

mapfile -t python_files < <(find ci -name '*.py')
python3 - "${python_files[@]}" <<'PYTHON'
import ast, sys
for file in sys.argv[1:]:
    with open(file, encoding="utf-8") as stream:
        ast.parse(stream.read(), file)
PYTHON

if ! command -v shellcheck >/dev/null; then
  echo "shellcheck is not installed; ${#python_files[@]} Python files are sound"
  exit "$skipped_status"
fi
mapfile -t shell_files < <(find ci -name '*.sh' -o -name '*.sbatch')
shellcheck -x -P SCRIPTDIR "${shell_files[@]}" .ci/run
echo "${#python_files[@]} Python and $((${#shell_files[@]} + 1)) shell scripts are sound"
