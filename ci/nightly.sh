#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Everything that is too slow for each change: all tests under both sanitizers, the full suites, the report on them in a browser, the
# planted pitfalls under several seeds, static analysis, the client of object stores against a real one, 30 minutes of runs under random
# faults, benchmarks, and the peers where they are installed. Results go to build/ci/nightly.
#
#   ci/nightly.sh [--python PYTHON]    an interpreter that can import torch, for the peers
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
use_huge_pages

python=${PYTHON:-python3}
if [[ ${1:-} == --python ]]; then python=${2:?"--python needs an interpreter"}; fi
seeds=(1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20)
pitfall_seeds=(1 2 3 4 5)
results=build/ci/nightly

say "Setting up"
ci/setup.sh --all
start_checks "$results"

say "The tree"
run_check includes_self_test python3 ci/check_includes.py --self-test
run_check includes python3 ci/check_includes.py
run_check count_self_test python3 ci/count_tests.py --self-test
run_check tree_self_test python3 ci/check_tree.py --self-test
run_check tree python3 ci/check_tree.py
run_check documents python3 ci/check_docs.py
run_check docs_commands_self_test python3 ci/run_docs.py --self-test
run_check mirror_self_test python3 ci/check_mirror.py --self-test
run_check mirror python3 ci/check_mirror.py
run_check reference_self_test python3 ci/command_reference.py --self-test
run_check format ci/check_format.sh
run_check scripts ci/check_scripts.sh
run_check gpu_targets_self_test python3 ci/gpu_targets.py --self-test

reports=()
for preset in cpu asan tsan; do
  say "All tests, preset $preset"
  report=$repository/build/$preset/junit.xml
  rm -rf "$report" "build/$preset/gtest"
  reports+=("$report")
  extra=()
  if [[ $preset == cpu ]]; then extra=(-DTANDEM_BENCHMARKS=ON "-DCMAKE_CUDA_ARCHITECTURES=80;90;100"); else extra=(-DTANDEM_ALL_TESTS=ON); fi
  run_check "configure_$preset" cmake --preset "$preset" "${extra[@]}"
  run_check "build_$preset" cmake --build --preset "$preset" -j "$num_jobs"
  run_check "ctest_$preset" ctest --preset "$preset" -j "$num_jobs" --output-junit "$report"
done
run_check object_store ci/object_store.sh build/cpu/optimized/optimized_test --gtest_filter='RealS3StoreTest.*'
run_check headers ci/check_headers.sh
run_check tidy ci/tidy.sh

say "Suites and pitfalls"
tandem=build/cpu/tandem
run_check commands python3 ci/command_reference.py --program "$tandem" --check
run_check docs_commands python3 ci/run_docs.py "$tandem" --all --python "$python"
run_check install ci/check_install.sh build/cpu
run_check compositions "$tandem" compose --plans 300 --seed "$(date +%j)" --save-failing "$results/compositions" --out "$results/compositions.json"
run_check adversity python3 ci/adversity.py "$tandem" --rounds 40 --seed "$(date +%j)"
run_check suites_full "$tandem" run --full --out "$results/suites.json"
run_check report "$tandem" report "$results/suites.json" --html "$results/report.html"
# The system's Python: Debian packages Selenium for that one.
run_check report_browser /usr/bin/python3 ci/report_browser.py "$results/report.html" --screenshots "$results/report"
run_check suites_adversary "$tandem" run --quick --adversary 7 --out "$results/suites_adversary.json"
for seed in "${seeds[@]}"; do
  run_check "suites_seed_$seed" "$tandem" run --quick --seed "$seed" --out "$results/suites_seed_$seed.json"
done
for seed in "${pitfall_seeds[@]}"; do
  run_check "pitfalls_seed_$seed" "$tandem" pitfalls --seed "$seed"
done
run_check performance_table python3 ci/performance_table.py "$tandem" --out "$results/performance_table.md"

say "Benchmarks and peers"
mapfile -t benchmarks < <(find build/cpu -type f -name '*_bench' -perm -u+x | LC_ALL=C sort)
for benchmark in "${benchmarks[@]}"; do
  name=$(basename "$benchmark")
  # These are no Google Benchmarks; they run beside their peers below.
  [[ $name == tandem_step_bench || $name == collectives_bench || $name == loader_bench ]] && continue
  run_check "$name" "$benchmark" --benchmark_out="$results/$name.json" --benchmark_out_format=json
done
for sequence in 64 256; do
  run_check "peer_train_step_$sequence" ci/peers/train_step.sh --python "$python" --sequence "$sequence" \
    --out "$results/train_step_$sequence.jsonl"
done

for transport in threads mpi; do
  run_check "soak_$transport" python3 ci/soak.py build/cpu/tandem --minutes 15 --seed "$(date +%j)00" --transport "$transport" \
    --out "$results/soak_$transport.jsonl"
done
run_check checkpoint_kill_all python3 cli/kill_test.py build/cpu/tandem build/cpu/cli/kill_shim.so --all
run_check fuzz ci/fuzz/run.sh --seconds 600
run_check cluster_batch_script ci/cluster/one_node_slurm.sh build/cpu/tandem "$results/cluster"
run_check gpu_bundle ci/gpu_bundle.sh --archive "$results/tandem_gpu.tar.gz"
# Where there is a card; else one line that says so.
gpu_if_any() {
  command -v nvidia-smi >/dev/null || { echo "no GPU here" && exit "$skipped_status"; }
  OUT=$results/gpu ci/gpu.sh
}
run_check gpu gpu_if_any
run_check peer_hugging_face "$python" ci/peers/hugging_face.py build/cpu/tandem
run_check peer_collectives ci/peers/collectives.sh --csv "$results/collectives.csv" build/cpu
run_check peer_simgrid python3 ci/peers/simgrid/compare.py --markdown "$results/simgrid.md" build/cpu/tandem
run_check peer_data_loader ci/peers/data_loader.sh --python "$python" --out "$results/data_loader.jsonl" build/cpu

say "Result after $SECONDS s"
python3 ci/count_tests.py --checks "$check_folder/checks.tsv" "${reports[@]}"
