#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# From a fresh Debian 12 machine to a verdict, in one command: installs what the program needs, builds it (not its tests), proves
# that 1, 2 and 4 data-parallel ranks compute the gradients of the reference, trains a small GPT on English text and lets it write.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
use_huge_pages

build=build/quickstart
tandem=$build/tandem
text=$build/text.txt
mkdir -p "$build"

say "Setting up"
ci/setup.sh --minimal

say "Building the program in $build"
begin=$SECONDS
build_program() {
  cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DTANDEM_TESTS=OFF -DTANDEM_MPI=OFF -DTANDEM_CUDA=OFF \
    -DTANDEM_EMULATED_GPU=OFF -DTANDEM_COLD=-O0 && cmake --build "$build" --target tandem
}
if ! build_program >"$build/build.log" 2>&1; then
  tail -n 40 "$build/build.log" >&2
  fail "the build failed; see $build/build.log"
fi
echo "built in $((SECONDS - begin)) s"

# The licence texts that every Debian system carries: 240 KB of English, in one file. Links are other names of the same texts.
data=synthetic
if [[ -d /usr/share/common-licenses ]]; then
  find /usr/share/common-licenses -type f -print0 | LC_ALL=C sort -z | xargs -0 cat >"$text"
  data=$text
else
  echo "no licence texts here: training on the synthetic corpus instead"
fi

say "Are 1, 2 and 4 data-parallel ranks the same as the reference? Error as a share of its derived bound"
"$tandem" run data_parallel/text --out "$build/result.json"

say "Training a small GPT on English text with 2 data-parallel ranks, and letting it write"
rm -rf "$build/checkpoint"
"$tandem" train docs/examples/tiny_text.json --data "$data" --set data=2 --steps 700 --out "$build/checkpoint"
"$tandem" generate --checkpoint "$build/checkpoint" --prompt "The licensee may " --tokens 200

say "Done in $SECONDS s. The verdicts and measurements are in $build/result.json; more: $tandem --help"
