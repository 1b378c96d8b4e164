#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Fuzzes every parser of files and messages under the address and undefined-behaviour sanitizers (clang's libFuzzer). It starts from the
# corpus kept in ci/fuzz/corpus and from files that the program writes; what reached something new is kept in build/fuzz/corpus.
#
#   ci/fuzz/run.sh [--seconds S] [--tandem PROGRAM] [--keep] [TARGET...]
#
#   --seconds S   for each target; default 600. A target's first line of output names it, its last one says what was run
#   --tandem P    makes the first inputs; default build/cpu/tandem
#   --keep        writes the smallest corpus that reaches the same back to ci/fuzz/corpus
#
# Exit status 1 where an input broke a parser; it lies in build/fuzz/crashes. 77: no clang with libFuzzer here.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

seconds=600 tandem=build/cpu/tandem keep='' targets=()
while (($#)); do
  case $1 in
    --seconds) seconds=${2:?"--seconds needs a number"} && shift ;;
    --tandem) tandem=${2:?"--tandem needs a program"} && shift ;;
    --keep) keep=yes ;;
    -*) fail "unknown option '$1'" ;;
    *) targets+=("$1") ;;
  esac
  shift
done
all=(config cluster model_shape result manifest data_manifest safetensors indexed_dataset llmc trace golden words heartbeat)
if ((${#targets[@]} == 0)); then targets=("${all[@]}"); fi

build=$repository/build/fuzz
mkdir -p "$build" "$build/crashes"
skip() {
  echo "$*"
  exit "$skipped_status"
}
command -v clang++ >/dev/null || skip "clang++ is not installed (ci/setup.sh --all)"
printf 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }\n' >"$build/probe.cpp"
clang++ -fsanitize=fuzzer,address "$build/probe.cpp" -o "$build/probe" 2>/dev/null || skip "clang++ has no libFuzzer (libclang-rt-14-dev)"

configure() {
  cmake -S . -B "$build" -G Ninja -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_BUILD_TYPE=RelWithDebInfo -DTANDEM_TESTS=OFF -DTANDEM_MPI=OFF \
    -DTANDEM_CUDA=OFF -DTANDEM_EMULATED_GPU=OFF -DTANDEM_FUZZ=ON -DTANDEM_SANITIZE=fuzzer-no-link,address,undefined
}
{ configure && cmake --build "$build" --target fuzz_parsers; } >"$build/build.log" 2>&1 || { tail -n 30 "$build/build.log" >&2 && fail "the build failed"; }
fuzzer=$build/ci/fuzz/fuzz_parsers

# First inputs: what the project ships, and small files that the program writes itself.
seeds=$build/seeds
rm -rf "$seeds"
for target in "${all[@]}"; do mkdir -p "$seeds/$target" "$build/corpus/$target" "ci/fuzz/corpus/$target"; done
cp docs/examples/*.json results/models/gpt2-124m.json "$seeds/config/"
cp results/clusters/*.json "$seeds/cluster/"
cp results/models/*.json "$seeds/model_shape/"
printf 'kill@step=7,rank=1' >"$seeds/words/fault"
printf 'pcie-25gbe,dilation=10,jitter=0.2' >"$seeds/words/link"
# Two files of one format as one input.
join() { { cat "$1" && printf '\n--\n' && cat "$2"; } >"$3"; }
make_seeds() {
  local work=$build/seed_work small=(--set layers=1 --set hidden=8 --set heads=2 --set sequence=8 --set rows=2)
  rm -rf "$work"
  mkdir -p "$work"
  "$tandem" run data_parallel/text --quick --out "$seeds/result/run.json"
  "$tandem" train --steps 2 "${small[@]}" --set checkpoint_every_steps=1 --out "$work/run"
  find "$work/run" -name manifest.json -exec cp {} "$seeds/manifest/" \;
  find "$work/run" -name '*.safetensors' -size -64k -exec cp {} "$seeds/safetensors/" \;
  printf 'a few words\n\nand a few more\n' >"$work/text.txt"
  "$tandem" data prepare --input "$work/text.txt" --tokenizer bytes --out "$work/data"
  join "$work/data.idx" "$work/data.bin" "$seeds/indexed_dataset/prepared"
  find "$work" -name 'data*.json' -exec cp {} "$seeds/data_manifest/" \;
  "$tandem" train --steps 1 "${small[@]}" --trace "$work/trace" || true
  if [[ -e $work/trace/trace.json ]]; then join "$work/trace/trace.json" "$work/trace/values.safetensors" "$seeds/trace/step"; fi
  for golden in results/golden/*/; do join "$golden/config.json" "$golden/data.safetensors" "$seeds/golden/$(basename "$golden")"; done
  python3 - "$seeds/llmc/tokens" <<'PYTHON'
import struct, sys
header = [20240520, 1, 6] + [0] * 253
open(sys.argv[1], "wb").write(struct.pack("<256i", *header) + struct.pack("<6H", 50256, 1, 2, 50256, 3, 4))
PYTHON
}
if [[ -x $tandem ]]; then
  make_seeds >"$build/seeds.log" 2>&1 || echo "fuzz: not all first inputs were made; see $build/seeds.log" >&2
else
  echo "fuzz: $tandem is not built; only shipped files to start from" >&2
fi

failed=0
fuzz() {
  local target=$1 status=0 log=$build/$1.log
  TANDEM_FUZZ=$target "$fuzzer" -max_total_time="$seconds" -timeout=60 -rss_limit_mb=2048 -max_len=65536 -print_final_stats=1 \
    -artifact_prefix="$build/crashes/$target-" "$build/corpus/$target" "$seeds/$target" "ci/fuzz/corpus/$target" >"$log" 2>&1 || status=$?
  printf '%-16s %s runs, %s edges, corpus %s, status %d\n' "$target" \
    "$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")" "$(grep -o 'cov: [0-9]*' "$log" | tail -n 1 | cut -c6-)" \
    "$(find "$build/corpus/$target" -type f | wc -l)" "$status"
  ((status == 0)) || { grep -m 3 -E 'ERROR|SUMMARY|runtime error|fuzz:|terminate|what\(\)' "$log" || true; }
  return "$status"
}
for target in "${targets[@]}"; do fuzz "$target" || failed=$((failed + 1)); done

if [[ -n $keep ]]; then
  for target in "${targets[@]}"; do
    kept=$build/kept/$target
    rm -rf "$kept"
    mkdir -p "$kept"
    TANDEM_FUZZ=$target "$fuzzer" -merge=1 -max_len=4096 "$kept" "$build/corpus/$target" "$seeds/$target" "ci/fuzz/corpus/$target" >/dev/null 2>&1 || true
    # Small ones only: a corpus is to be read again in seconds and kept in the repository.
    find "$kept" -type f -size -2k | LC_ALL=C sort | awk "NR <= 20" | xargs -r cp -t "ci/fuzz/corpus/$target"
  done
fi
echo "fuzz: $failed of ${#targets[@]} parsers broken, $seconds s each"
((failed == 0)) || exit 1
