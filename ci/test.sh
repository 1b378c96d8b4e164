#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Everything a change must pass: checks of the tree, all tests, and the tests of some rooms once more under the sanitizers.
# The last line is "N passed, N failed, N skipped", counted from the reports; skipped tests are listed with their reasons.
#
#   ci/test.sh [--no-sanitizers] [--asan "LABEL..."] [--tsan "LABEL..."]
#
# A label is a room of the house: core, kernels, reference, optimized, harness, suites, cli; or gpu: the CUDA kernels on the emulated GPU.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
use_huge_pages

asan_labels="kernels optimized"
tsan_labels="optimized gpu"
while (($#)); do
  case $1 in
    --no-sanitizers) asan_labels='' tsan_labels='' ;;
    --asan) asan_labels=${2:?"--asan needs labels"} && shift ;;
    --tsan) tsan_labels=${2:?"--tsan needs labels"} && shift ;;
    *) fail "unknown option '$1'" ;;
  esac
  shift
done

reports=()

# build_and_test PRESET [LABEL...]: builds all, or the tests of these rooms, and runs them.
build_and_test() {
  local preset=$1 targets=() selection=() settings=(-DTANDEM_TEST_SHARDS=16) label
  shift
  for label in "$@"; do targets+=("${label}_test"); done
  if (($#)); then
    targets=(--target "${targets[@]}")
    selection=(-L "^($(IFS='|' && echo "$*"))\$")
  fi
  local report=$repository/build/$preset/junit.xml
  rm -rf "$report" "build/$preset/gtest"
  reports+=("$report")
  # Undefined behaviour is nightly's: a quarter of the build, in a run that is to stay under 25 minutes.
  if [[ $preset == asan ]]; then settings=(-DTANDEM_SANITIZE=address -DTANDEM_TEST_SHARDS=8 -DTANDEM_EMULATED_GPU=OFF); fi
  if [[ $preset == tsan ]]; then settings=(-DTANDEM_TEST_SHARDS=8); fi
  run_check "configure_$preset" cmake --preset "$preset" "${settings[@]}"
  run_check "build_$preset" cmake --build --preset "$preset" -j "$num_jobs" "${targets[@]}"
  run_check "ctest_$preset" ctest --preset "$preset" -j "$num_jobs" "${selection[@]}" --output-junit "$report"
}

say "Setting up"
ci/setup.sh
start_checks build/ci/test

say "Checking the tree"
run_check includes_self_test python3 ci/check_includes.py --self-test
run_check includes python3 ci/check_includes.py
run_check count_self_test python3 ci/count_tests.py --self-test
run_check unity_self_test python3 cmake/unity.py --self-test
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

say "Building and testing"
build_and_test cpu
run_check commands python3 ci/command_reference.py --program build/cpu/tandem --check
run_check docs_commands python3 ci/run_docs.py build/cpu/tandem
run_check install ci/check_install.sh build/cpu
# The script for machines with a GPU, on the emulated one.
run_check gpu_script env OUT=build/ci/gpu_results ci/gpu.sh --dry

if [[ -n $asan_labels ]]; then
  say "Testing under the address sanitizer: $asan_labels"
  read -ra labels <<<"$asan_labels"
  build_and_test asan "${labels[@]}"
fi
if [[ -n $tsan_labels ]]; then
  say "Testing under the thread sanitizer: $tsan_labels"
  read -ra labels <<<"$tsan_labels"
  build_and_test tsan "${labels[@]}"
fi

say "Result after $SECONDS s"
python3 ci/count_tests.py --checks "$check_folder/checks.tsv" "${reports[@]}"
