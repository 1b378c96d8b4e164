#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Compares the threads transport's all-reduce with Open MPI's on this machine: fp32, 1 MiB to 64 MiB, 2 and 4 ranks.
#
#   ci/peers/allreduce.sh [--rounds N] [--repetitions N] [--buffers fresh|reused] [--markdown FILE] BUILD_FOLDER
#
# BUILD_FOLDER holds comm_bench (cmake -DTANDEM_BENCHMARKS=ON). For each size the programs take turns, so that drift of the machine
# hits all: threads (which sums in place), MPI in place, MPI with two buffers, and again. Ratios are formed within a round; the table
# has their median and range over the rounds. MPI gets the allocator settings that it needs where first touches
# are slow. Exit status 77 with a reason where Open MPI is not installed.
set -euo pipefail
caller_folder=$PWD
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

rounds=5 repetitions=11 buffers=fresh markdown='' build=''
while (($#)); do
  case $1 in
    --rounds) rounds=$2 && shift ;;
    --repetitions) repetitions=$2 && shift ;;
    --buffers) buffers=$2 && shift ;;
    --markdown) markdown=$(cd "$caller_folder" && realpath -m "$2") && shift ;;
    -*) fail "unknown option '$1'" ;;
    *) build=$(cd "$caller_folder" && realpath "$1") ;;
  esac
  shift
done
[[ -n $build ]] || fail "which build folder? see the head of this script"
threads_bench=$(find "$build" -type f -name comm_bench -perm -u+x | head -n 1)
[[ -n $threads_bench ]] || fail "no comm_bench below $build; configure with -DTANDEM_BENCHMARKS=ON and build it"
for tool in mpicxx mpirun python3; do
  command -v "$tool" >/dev/null || { echo "skipped: $tool is not installed" && exit "$skipped_status"; }
done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mpicxx -std=c++20 -O3 -DOMPI_SKIP_MPICXX -o "$work/mpi_allreduce" ci/peers/mpi_allreduce.cpp

run_mpi() { # WAY RANKS BYTES
  OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 GLIBC_TUNABLES=glibc.malloc.hugetlb=1 \
    MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=4294967296 \
    mpirun --oversubscribe -np "$2" "$work/mpi_allreduce" "$repetitions" "$buffers" "$1" "$3"
}

for ranks in 2 4; do
  for mebibytes in 1 2 4 8 16 32 64; do
    bytes=$((mebibytes * 1048576))
    for ((round = 0; round < rounds; ++round)); do
      "$threads_bench" "$ranks" "$repetitions" "$buffers" "$bytes" | sed "s/^/$round threads /" >>"$work/lines"
      for way in in_place two_buffers; do
        run_mpi "$way" "$ranks" "$bytes" | sed "s/^/$round $way /" >>"$work/lines"
      done
    done
  done
done

cat >"$work/table.py" <<'EOF'
import collections, json, statistics, sys

times = collections.defaultdict(dict)  # (ranks, bytes) -> (round, program) -> median us
for line in open(sys.argv[1]):
    turn, program, result = line.split(" ", 2)
    result = json.loads(result)
    times[result["ranks"], result["bytes"]][int(turn), program] = result["median_us"]

print("| ranks | MiB | threads us | GB/s | MPI in place us | ratio | MPI two buffers us | ratio |")
print("| --- | --- | --- | --- | --- | --- | --- | --- |")
for (ranks, size), runs in sorted(times.items()):
    turns = sorted({turn for turn, _ in runs})
    own = statistics.median(runs[turn, "threads"] for turn in turns)
    row = [str(ranks), str(size >> 20), f"{own:.0f}", f"{size / own / 1e3:.1f}"]
    for way in ("in_place", "two_buffers"):
        ratios = [runs[turn, way] / runs[turn, "threads"] for turn in turns]
        row.append(f"{statistics.median(runs[turn, way] for turn in turns):.0f}")
        row.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})")
    print("| " + " | ".join(row) + " |")
EOF
table=$(python3 "$work/table.py" "$work/lines")
printf 'All-reduce, fp32, %s buffers: medians of %d rounds of %d repetitions; %s, %d cores, %s\n\n%s\n' "$buffers" "$rounds" \
  "$repetitions" "$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)" "$(nproc)" \
  "$(mpirun --version | head -n 1)" "$table" | tee ${markdown:+"$markdown"}
