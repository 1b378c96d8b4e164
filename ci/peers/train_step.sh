#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A whole training step of GPT-2 124M, ours and PyTorch's: first each variant of the peer once, then ours and its best variant
# in turns (A B A B), so that a machine that changes its speed changes it for both. Prints the ratio and a Markdown table.
#
#   ci/peers/train_step.sh [--ours PROGRAM] [--python PYTHON] [--batch 4] [--sequence 256] [--threads 2] [--steps 5] [--rounds 3]
#                          [--precision fp32|bf16|bf16-autocast] [--backend cpu|cuda] [--variants LIST] [--out FILE.jsonl]
#
# On a GPU both train a vocabulary of 50,304 (a multiple of 64, as one would there), and --variants compile/fused spares the others.
# In bf16 the peer is PyTorch under autocast, whichever of the two ours is.
# Ours is `tandem train` on the synthetic corpus; its report has tokens_per_second and step_seconds.median, the first step left out.
# Exit status 77: the peer or ours is missing.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

use_huge_pages

ours=build/cpu/tandem
python=${PYTHON:-python3}
batch=4 sequence=256 threads=2 steps=5 rounds=3 precision=fp32 out='' backend=cpu variants=''
while (($#)); do
  (($# >= 2)) || fail "$1 needs a value"
  case $1 in
    --ours) ours=$2 ;;
    --python) python=$2 ;;
    --batch) batch=$2 ;;
    --sequence) sequence=$2 ;;
    --threads) threads=$2 ;;
    --steps) steps=$2 ;;
    --rounds) rounds=$2 ;;
    --precision) precision=$2 ;;
    --backend) backend=$2 ;;
    --variants) variants=$2 ;;
    --out) out=$2 ;;
    *) fail "unknown option '$1'" ;;
  esac
  shift 2
done

skip() {
  echo "$*"
  exit "$skipped_status"
}
command -v "$ours" >/dev/null || skip "$ours is not built (cmake --workflow --preset cpu)"
"$python" -c 'import torch' 2>/dev/null || skip "$python cannot import torch; name one that can with --python"

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
shape=(--batch "$batch" --sequence "$sequence" --threads "$threads" --steps "$steps" --precision "${precision%-autocast}" --device "$backend")
on_gpu=()
if [[ $backend == cuda ]]; then
  shape+=(--vocabulary 50304)
  on_gpu=(--set vocabulary=50304)
fi
our_step() {
  "$ours" train results/models/gpt2-124m.json --data synthetic --steps "$((steps + 1))" --set dropout=0 --set rows="$batch" \
    --set sequence="$sequence" --set micro_batches=1 --set threads_per_rank="$threads" --set evaluate_every_steps=0 \
    --set evaluate_batches=1 --set precision="$precision" --backend "$backend" "${on_gpu[@]}" --json "$scratch/step.json" >&2
  "$python" -c 'import json, sys; print(json.dumps(json.load(open(sys.argv[1]))))' "$scratch/step.json"
}
torch_step() { "$python" ci/peers/torch_gpt2.py "${shape[@]}" "$@" 2>>"$scratch/torch.err"; }

torch_step --variants "$variants" >"$scratch/variants.jsonl" || { cat "$scratch/torch.err" >&2 && fail "the peer did not run"; }
best=$("$python" ci/peers/summarize.py --best-variant "$scratch/variants.jsonl")
for ((round = 1; round <= rounds; ++round)); do
  printf 'round %d of %d: ours, then %s\n' "$round" "$rounds" "$best" >&2
  our_step >>"$scratch/ours.jsonl"
  torch_step --variants "$best" >>"$scratch/best.jsonl"
done
if [[ -n $out ]]; then cat "$scratch"/{variants,best,ours}.jsonl >"$out"; fi
"$python" ci/peers/summarize.py --ours "$scratch/ours.jsonl" --peer "$scratch/best.jsonl" "$scratch/variants.jsonl"
