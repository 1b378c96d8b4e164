#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Everything that needs a GPU, in one command: builds the CUDA backend for the card found, compares every operator with the reference,
# measures the kernels and a training step of GPT-2 124M beside PyTorch, runs the suites on 1, 2 and 4 virtual ranks of one card and over
# NCCL on all cards, and looks for bad memory accesses and races. Meant to take under eight minutes; what matters most comes first.
# Without network: see ci/gpu_bundle.sh.
#
#   ci/gpu.sh          results and logs in ${OUT:-results/gpu}; the last line is "N passed, N failed, N skipped"
#   ci/gpu.sh --dry    the same commands on the emulated GPU, with sizes to match, to try what of this script needs no card
#   PARTS="kernels step" ci/gpu.sh    some parts only: operators kernels step peer suites nccl sanitizers
#
# Where $BASELINE (results/gpu/baseline) has a training step of the same card, this one is compared with it: slower is a failure. To make
# a baseline, copy $OUT/train_step.json there. Exit status 2, in one line, where there is no GPU.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
use_huge_pages

dry=''
if [[ ${1:-} == --dry ]]; then dry=yes; elif (($#)); then fail "unknown option '$1'; use --dry or none"; fi
out=${OUT:-results/gpu}
baseline=${BASELINE:-results/gpu/baseline}
build=build/gpu
backend=cuda
parts=" ${PARTS:-operators kernels step peer suites nccl sanitizers} "
wants() { [[ $parts == *" $1 "* ]]; }
export PATH=$PATH:/usr/local/cuda/bin LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}

skip() {
  echo "$*"
  exit "$skipped_status"
}
# A rank that hangs in a driver does not answer a polite signal.
limited() { timeout -k 5 "$@"; }

if [[ -n $dry ]]; then
  backend=simt build=${BUILD:-build/cpu} gpus=0 card='emulated GPU'
else
  command -v nvidia-smi >/dev/null || fail "no GPU: nvidia-smi is not here (--dry tries this script on the emulated one)"
  gpus=$({ nvidia-smi --list-gpus 2>/dev/null || true; } | grep -c '^GPU ' || true)
  ((gpus > 0)) || fail "no GPU: nvidia-smi lists none"
  card=$(nvidia-smi --query-gpu=name --format=csv,noheader -i 0)
  architecture=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader -i 0 | tr -d .)
  command -v nvcc >/dev/null || fail "nvcc is not in PATH, and not in /usr/local/cuda/bin"
  # cuBLAS and NCCL may have come with Python packages alone.
  while read -r folder; do LD_LIBRARY_PATH=$LD_LIBRARY_PATH:$folder; done < <(
    python3 -c 'import glob, nvidia; print(*(d for p in nvidia.__path__ for d in glob.glob(p + "/*/lib")), sep="\n")' 2>/dev/null || true
  )
fi
mkdir -p "$out"
start_checks "$out/logs"
say "$card, $gpus in all; results in $out"

configure() {
  local first=()
  # Where the libraries are installed they are taken from there.
  if [[ ! -e /usr/include/fmt/core.h && -e build/gpu_bundle/bundle.cmake ]]; then first=(-C build/gpu_bundle/bundle.cmake); fi
  cmake "${first[@]}" -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DTANDEM_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES="$architecture" \
    -DTANDEM_EMULATED_GPU=OFF -DTANDEM_WERROR=OFF
}
if [[ -z $dry ]]; then
  say "Building"
  run_check configure configure
  run_check build cmake --build "$build" -j "$num_jobs" --target tandem gpu_test cuda_bench optimized_test
fi
tandem=$build/tandem

inventory() {
  if [[ -z $dry ]]; then
    nvidia-smi --query-gpu=index,name,driver_version,memory.total,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu,ecc.mode.current \
      --format=csv
    nvidia-smi topo -m 2>/dev/null || true
  fi
  "$tandem" --version
}
run_check inventory inventory

# tested SECONDS PROGRAM FILTER: a run whose tests were skipped for want of a device is no success here.
tested() {
  local log status=0
  log=$(mktemp)
  TANDEM_TEST_BACKEND=$backend limited "$1" "$2" --gtest_brief=1 --gtest_filter="$3" >"$log" 2>&1 || status=$?
  cat "$log"
  if grep -q 'no CUDA device' "$log"; then
    echo "tests were skipped: the program finds no device"
    status=1
  fi
  rm -f "$log"
  return "$status"
}
operators() { tested 120 "$build/kernels/gpu_test" 'Cuda*:Device*'; }
engine() { tested 60 "$build/optimized/optimized_test" '*EngineOnDevice*:*Device*'; }
if wants operators; then
  say "Operators and the engine against the reference"
  run_check operators operators
  if [[ -z $dry ]]; then run_check engine engine; fi
fi

kernels() {
  local bench=("$build/kernels/cuda_bench" --backend "$backend" --json "$out/kernels.json")
  if [[ -z $dry ]]; then bench+=(--check); else bench+=(--tiny); fi
  limited 90 "${bench[@]}"
}
if wants kernels; then
  say "Kernels"
  run_check kernels kernels
fi

step() {
  local steps=30 shape=(--set rows=64 --set sequence=1024 --set precision=bf16 --set vocabulary=50304)
  if [[ -n $dry ]]; then
    steps=3 shape=(--set layers=1 --set hidden=32 --set heads=2 --set rows=2 --set sequence=16 --set vocabulary=64)
  fi
  limited 100 "$tandem" train results/models/gpt2-124m.json --backend "$backend" --data synthetic --steps "$steps" --set dropout=0 \
    --set micro_batches=1 --set evaluate_every_steps=0 --set evaluate_batches=1 "${shape[@]}" --json "$out/train_step.json"
}
if wants step; then
  say "A training step of GPT-2 124M"
  run_check train_step step
fi
peer() {
  python3 -c 'import torch' 2>/dev/null || skip "python3 cannot import torch"
  limited 200 ci/peers/train_step.sh --ours "$tandem" --python python3 --backend cuda --batch 64 --sequence 1024 --precision bf16 \
    --steps 15 --rounds 1 --variants compile/fused --out "$out/train_step_peer.jsonl"
}
if [[ -z $dry ]]; then
  if wants peer; then run_check peer peer; fi
  if wants step; then
    run_check targets python3 ci/gpu_targets.py "$out"
    if [[ -e $baseline/train_step.json ]]; then run_check baseline python3 ci/gpu_targets.py "$out" --baseline "$baseline"; fi
  fi
fi

if wants suites; then
  say "Suites on virtual ranks of one card"
  suites=(data_parallel tensor_parallel pipeline_parallel context_parallel expert_parallel hybrid_parallel zero recomputation loss_scaling
    overlap compression checkpoint)
  rank_counts=(1 2 4)
  if [[ -n $dry ]]; then suites=(data_parallel/ranks2/accum1/fp32) rank_counts=(2); fi
  for ranks in "${rank_counts[@]}"; do
    run_check "suites_ranks$ranks" limited 100 "$tandem" run "${suites[@]}" --quick --ranks "$ranks" --backend "$backend" \
      --out "$out/suites_ranks$ranks.json"
  done
fi

# processes N SECONDS ARGUMENT...: the program as N ranks, started as torchrun would: one process for each GPU, or several on one. What
# a batch system says of this shell is not said of them.
processes() {
  local count=$1 seconds=$2 rank status=0 pids=()
  shift 2
  for ((rank = 0; rank < count; ++rank)); do
    env -u PMIX_RANK -u PMI_SIZE -u OMPI_COMM_WORLD_SIZE MASTER_ADDR=127.0.0.1 MASTER_PORT="${MASTER_PORT:-29513}" WORLD_SIZE="$count" \
      RANK="$rank" LOCAL_RANK="$rank" timeout -k 5 "$seconds" "$tandem" "$@" &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
  return "$status"
}
if [[ -z $dry ]] && wants nccl; then
  say "NCCL"
  if ! "$tandem" list --json - | grep -q '"nccl"'; then
    run_check nccl skip "this build has no NCCL (no nccl.h)"
  else
    if ((gpus > 1)); then
      ranks=$((gpus >= 4 ? 4 : 2))
      run_check nccl_suites processes "$ranks" 150 run data_parallel tensor_parallel zero --quick --ranks "$ranks" --transport nccl \
        --backend cuda --out "$out/nccl_ranks$ranks.json"
      run_check nccl_probe processes "$gpus" 90 probe --transport nccl --backend cuda --seconds 20 --out "$out/cluster.json"
    fi
    # Two ranks on one card: right numbers, no bandwidth to speak of.
    one_card() { CUDA_VISIBLE_DEVICES=0 processes 2 100 run data_parallel/ranks2/accum1/fp32 --transport nccl --backend cuda; }
    run_check nccl_one_card one_card
  fi
fi

sanitize() {
  command -v compute-sanitizer >/dev/null || skip "compute-sanitizer is not here"
  local status=0 log
  log=$(mktemp)
  TANDEM_TEST_BACKEND=$backend limited 60 compute-sanitizer --tool "$1" --error-exitcode 1 --print-limit 5 "$build/kernels/gpu_test" \
    --gtest_brief=1 --gtest_filter="${SANITIZED_TESTS:-CudaAttentionSegments*:CudaNorm*:CudaSum*:CudaUpdate*:CudaCompression*}" \
    >"$log" 2>&1 || status=$?
  cat "$log"
  if grep -q 'Device not supported' "$log"; then skip "compute-sanitizer does not support this device here"; fi
  return "$status"
}
if [[ -z $dry ]] && wants sanitizers; then
  say "Memory accesses and races"
  for tool in memcheck racecheck synccheck; do run_check "sanitizer_$tool" sanitize "$tool"; done
fi

say "Result after $SECONDS s"
python3 ci/count_tests.py --checks "$check_folder/checks.tsv"
