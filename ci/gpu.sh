#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Everything that needs a GPU, in one command and under eight minutes: builds the CUDA backend for the card found, compares every operator
# with the reference, runs the suites on 1, 2 and 4 virtual ranks of one card and over NCCL on all cards, looks for bad memory accesses
# and races, and measures the kernels and a training step of GPT-2 124M beside PyTorch. Without network: see ci/gpu_bundle.sh.
#
#   ci/gpu.sh          results in ${OUT:-results/gpu}; the last line is "N passed, N failed, N skipped"
#   ci/gpu.sh --dry    the same commands on the emulated GPU, with sizes to match, to try this script on a machine without one
#
# Where $BASELINE (results/gpu/baseline) has the results of the same card, the step and the suites are compared with them: slower is
# a failure. To make a baseline, copy $OUT there. Exit status 2, in one line, where there is no GPU.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
use_huge_pages

dry=''
if [[ ${1:-} == --dry ]]; then dry=yes; elif (($#)); then fail "unknown option '$1'; use --dry or none"; fi
out=${OUT:-results/gpu}
baseline=${BASELINE:-results/gpu/baseline}
build=build/gpu
backend=cuda
export PATH=$PATH:/usr/local/cuda/bin

skip() {
  echo "$*"
  exit "$skipped_status"
}

if [[ -n $dry ]]; then
  backend=simt build=${BUILD:-build/cpu} gpus=0 card='emulated GPU'
else
  command -v nvidia-smi >/dev/null || fail "no GPU: nvidia-smi is not here (--dry tries this script on the emulated one)"
  gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l)
  ((gpus > 0)) || fail "no GPU: nvidia-smi lists none"
  card=$(nvidia-smi --query-gpu=name --format=csv,noheader -i 0)
  architecture=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader -i 0 | tr -d .)
  command -v nvcc >/dev/null || fail "nvcc is not in PATH, and not in /usr/local/cuda/bin"
fi
mkdir -p "$out"
start_checks build/ci/gpu
say "$card, $gpus in all; results in $out"

configure() {
  local first=()
  # Where the libraries are installed they are taken from there.
  if [[ ! -e /usr/include/fmt/core.h && -e build/gpu_bundle/bundle.cmake ]]; then first=(-C build/gpu_bundle/bundle.cmake); fi
  cmake "${first[@]}" -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DTANDEM_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES="$architecture" \
    -DTANDEM_EMULATED_GPU=OFF -DTANDEM_COLD=-O0
}
if [[ -z $dry ]]; then
  say "Building"
  run_check configure configure
  run_check build cmake --build "$build" -j "$num_jobs" --target tandem gpu_test cuda_bench
fi
tandem=$build/tandem

inventory() {
  if [[ -z $dry ]]; then
    nvidia-smi --query-gpu=index,name,driver_version,memory.total,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu,ecc.mode.current \
      --format=csv >"$out/inventory.csv"
    nvidia-smi topo -m >>"$out/inventory.csv" 2>/dev/null || true
    cat "$out/inventory.csv"
  fi
  "$tandem" --version
}
run_check inventory inventory

say "Operators against the reference"
operators() { TANDEM_TEST_BACKEND=$backend timeout 120 "$build/kernels/gpu_test" --gtest_brief=1 "$@"; }
run_check operators operators

say "Suites on virtual ranks of one card"
suites=(data_parallel tensor_parallel pipeline_parallel context_parallel expert_parallel hybrid_parallel zero recomputation loss_scaling
  overlap compression checkpoint)
rank_counts=(1 2 4)
if [[ -n $dry ]]; then suites=(data_parallel/ranks2/accum1/fp32) rank_counts=(2); fi
for ranks in "${rank_counts[@]}"; do
  run_check "suites_ranks$ranks" timeout 100 "$tandem" run "${suites[@]}" --quick --ranks "$ranks" --backend "$backend" \
    --out "$out/suites_ranks$ranks.json"
done

say "Memory accesses and races"
sanitize() {
  command -v compute-sanitizer >/dev/null || skip "compute-sanitizer is not here"
  timeout 60 compute-sanitizer --tool "$1" --error-exitcode 1 --print-limit 5 env TANDEM_TEST_BACKEND="$backend" \
    "$build/kernels/gpu_test" --gtest_brief=1 --gtest_filter="${SANITIZED_TESTS:-CudaAttentionSegments*:CudaNorm*:CudaRows*:CudaSum*:CudaUpdate*:CudaCompression*}"
}
if [[ -z $dry ]]; then
  for tool in memcheck racecheck synccheck; do run_check "sanitizer_$tool" sanitize "$tool"; done
fi

say "NCCL"
# processes N ARGUMENT...: the program as N ranks, started as torchrun would: one process for each GPU, or several on one.
processes() {
  local count=$1 rank status=0 pids=()
  shift
  for ((rank = 0; rank < count; ++rank)); do
    MASTER_ADDR=127.0.0.1 MASTER_PORT=${MASTER_PORT:-29513} WORLD_SIZE=$count RANK=$rank LOCAL_RANK=$rank timeout 100 "$tandem" "$@" &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
  return "$status"
}
if [[ -z $dry ]]; then
  if ((gpus > 1)); then
    run_check nccl_suites processes "$gpus" run collectives data_parallel tensor_parallel zero --quick --transport nccl --backend cuda \
      --out "$out/nccl_ranks$gpus.json"
    run_check nccl_probe processes "$gpus" probe --transport nccl --seconds 20 --out "$out/cluster.json"
  fi
  # Two ranks on one card: right numbers, no bandwidth to speak of.
  run_check nccl_one_card env CUDA_VISIBLE_DEVICES=0 bash -c "$(declare -f processes); tandem=$tandem processes 2 run data_parallel/ranks2 \
    --quick --transport nccl --backend cuda --out '$out/nccl_one_card.json'"
fi

say "Kernels"
bench=("$build/kernels/cuda_bench" --backend "$backend" --json "$out/kernels.json")
if [[ -z $dry ]]; then bench+=(--check); else bench+=(--tiny); fi
kernels() { timeout 90 "${bench[@]}" | tee "$out/kernels.txt"; }
run_check kernels kernels

say "A training step of GPT-2 124M"
step() {
  local shape=(--set rows=64 --set sequence=1024 --set precision=bf16 --set vocabulary=50304)
  if [[ -n $dry ]]; then shape=(--set layers=1 --set hidden=32 --set heads=2 --set rows=2 --set sequence=16 --set vocabulary=64); fi
  timeout 100 "$tandem" train results/models/gpt2-124m.json --backend "$backend" --data synthetic --steps "${STEPS:-3}" --set dropout=0 \
    --set micro_batches=1 --set evaluate_every_steps=0 --set evaluate_batches=1 "${shape[@]}" --json "$out/train_step.json"
}
if [[ -n $dry ]]; then run_check train_step step; else STEPS=30 run_check train_step step; fi
peer() {
  python3 -c 'import torch' 2>/dev/null || skip "python3 cannot import torch"
  timeout 170 ci/peers/train_step.sh --ours "$tandem" --python python3 --backend cuda --batch 64 --sequence 1024 --precision bf16 --steps 15 \
    --rounds 2 --variants compile/fused --out "$out/train_step_peer.jsonl" | tee "$out/train_step_peer.txt"
}
if [[ -z $dry ]]; then
  run_check peer peer
  targets() { python3 ci/gpu_targets.py "$out"; }
  run_check targets targets
  if [[ -d $baseline ]]; then
    for file in train_step suites_ranks1; do
      [[ -e $baseline/$file.json ]] || continue
      if [[ $file == train_step ]]; then
        run_check "baseline_$file" python3 ci/gpu_targets.py "$out" --baseline "$baseline"
      else
        run_check "baseline_$file" "$tandem" compare "$baseline/$file.json" "$out/$file.json"
      fi
    done
  fi
fi

say "Result after $SECONDS s"
cp "$check_folder/checks.tsv" "$out/checks.tsv"
python3 ci/count_tests.py --checks "$check_folder/checks.tsv"
