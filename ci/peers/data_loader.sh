#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Tokens a second of our data loader and of PyTorch's DataLoader over the same memory-mapped tokens, in turns (A B A B), so that a
# machine that changes its speed changes it for both.
#
#   ci/peers/data_loader.sh [--python PYTHON] [--rounds N] [--seconds S] [--tokens N] [--least RATIO] [--out FILE.jsonl] BUILD_FOLDER
#
# BUILD_FOLDER holds loader_bench (cmake -DTANDEM_BENCHMARKS=ON). Ours makes batches when asked for (0 threads) or ahead in 1 and 2
# threads; the peer in the process itself or in 2 workers, as int64 or int32, which are the fastest that it has here. A consumer that
# takes no time waits for them. Prints medians, the ratio of the best on either side for the stream and for padded documents, and fails
# where the stream's is below --least (5). Exit status 77: the peer or ours is missing.
set -euo pipefail
caller_folder=$PWD
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

python=${PYTHON:-python3} rounds=5 seconds=1 tokens=67108864 least=5 out='' build=''
while (($#)); do
  case $1 in
    --python) python=$2 && shift ;;
    --rounds) rounds=$2 && shift ;;
    --seconds) seconds=$2 && shift ;;
    --tokens) tokens=$2 && shift ;;
    --least) least=$2 && shift ;;
    --out) out=$(cd "$caller_folder" && realpath -m "$2") && shift ;;
    -*) fail "unknown option '$1'" ;;
    *) build=$(cd "$caller_folder" && realpath "$1") ;;
  esac
  shift
done
[[ -n $build ]] || fail "which build folder? see the head of this script"
bench=$(find "$build" -type f -name loader_bench -perm -u+x | head -n 1)
[[ -n $bench ]] || { echo "skipped: no loader_bench below $build; configure with -DTANDEM_BENCHMARKS=ON" && exit "$skipped_status"; }
"$python" -c 'import numpy, torch' 2>/dev/null || { echo "skipped: $python cannot import torch and numpy" && exit "$skipped_status"; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$bench" --make "$work/data" --tokens "$tokens"

ours() { "$bench" --data "$work/data" --seconds "$seconds" "$@" >>"$work/ours.jsonl"; }
peer() { "$python" ci/peers/torch_data_loader.py --data "$work/data" --seconds "$seconds" "$@" >>"$work/peer.jsonl"; }
for ((round = 0; round < rounds; ++round)); do
  for batching in stream padded; do
    ours --batching "$batching" --ahead 0
    peer --batching "$batching" --workers 0
    ours --batching "$batching" --threads 1
    peer --batching "$batching" --workers 0 --dtype int32
    ours --batching "$batching" --threads 2
    peer --batching "$batching" --workers 2
  done
  for batching in bucketed packed; do ours --batching "$batching" --ahead 0; done
done

cat >"$work/table.py" <<'EOP'
import collections, json, statistics, sys

work, least, out = sys.argv[1], float(sys.argv[2]), sys.argv[3]
rates = collections.defaultdict(list)  # (who, batching, how) -> [(tokens/s, tokens/s of CPU)]
lines = []
for who in ("ours", "peer"):
    for text in open(f"{work}/{who}.jsonl"):
        line = json.loads(text)
        lines.append({"who": who, **line})
        if who == "ours":
            how = "when asked for" if line["ahead"] == 0 else f"ahead, {line['threads']} thread(s)"
        else:
            how = f"{line['workers']} workers, {line['dtype']}"
        rates[who, line["batching"], how].append((line["tokens_per_second"], line["tokens_per_cpu_second"]))
if out:
    with open(out, "w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
medians = {key: [statistics.median(column) for column in zip(*values)] for key, values in rates.items()}
print("| loader | batching | how | million tokens/s | per second of CPU |\n| --- | --- | --- | --- | --- |")
for (who, batching, how), (rate, of_cpu) in sorted(medians.items(), key=lambda item: (item[0][1], item[0][0])):
    shown = f"{of_cpu / 1e6:.0f}" if who == "ours" or how.startswith("0") else ""
    print(f"| {'tandem' if who == 'ours' else 'PyTorch'} | {batching} | {how} | {rate / 1e6:.0f} | {shown} |")
ratios = {}
for batching in ("stream", "padded"):
    best = {who: max(value[0] for key, value in medians.items() if key[:2] == (who, batching)) for who in ("ours", "peer")}
    ratios[batching] = best["ours"] / best["peer"]
    print(f"{batching}: best of ours over best of the peer: {ratios[batching]:.1f}")
sys.exit(0 if ratios["stream"] >= least else f"the stream's ratio is below {least}")
EOP
python3 "$work/table.py" "$work" "$least" "$out"
