#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# All-reduce from 8 B to 64 MB on this machine: shared memory of threads, messages of threads, messages over MPI, and Open MPI's own
# MPI_Allreduce.
#
#   ci/peers/collectives.sh [--rounds N] [--ranks LIST] [--markdown FILE] [--csv FILE] BUILD_FOLDER
#
# BUILD_FOLDER holds collectives_bench (cmake -DTANDEM_BENCHMARKS=ON). In each round the programs take turns, so that drift of the
# machine hits all; the table has medians over the rounds, for messages of the algorithm that is fastest at the size. MPI_Allreduce
# is called in place, with the allocator settings that it needs where first touches are slow. Exit status 77 with a reason where
# Open MPI is not installed.
set -euo pipefail
caller_folder=$PWD
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

rounds=5 ranks_list='2 4' markdown='' csv='' build=''
while (($#)); do
  case $1 in
    --rounds) rounds=$2 && shift ;;
    --ranks) ranks_list=$2 && shift ;;
    --markdown) markdown=$(cd "$caller_folder" && realpath -m "$2") && shift ;;
    --csv) csv=$(cd "$caller_folder" && realpath -m "$2") && shift ;;
    -*) fail "unknown option '$1'" ;;
    *) build=$(cd "$caller_folder" && realpath "$1") ;;
  esac
  shift
done
[[ -n $build ]] || fail "which build folder? see the head of this script"
bench=$(find "$build" -type f -name collectives_bench -perm -u+x | head -n 1)
[[ -n $bench ]] || fail "no collectives_bench below $build; configure with -DTANDEM_BENCHMARKS=ON and build it"
for tool in mpicxx mpirun python3; do
  command -v "$tool" >/dev/null || { echo "skipped: $tool is not installed" && exit "$skipped_status"; }
done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mpicxx -std=c++20 -O3 -DOMPI_SKIP_MPICXX -o "$work/mpi_allreduce" ci/peers/mpi_allreduce.cpp

run_mpi() { # RANKS PROGRAM ARGUMENTS...
  local ranks=$1
  shift
  OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 GLIBC_TUNABLES=glibc.malloc.hugetlb=1 \
    MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=4294967296 \
    mpirun --oversubscribe -np "$ranks" "$@"
}

for ranks in $ranks_list; do
  for ((round = 0; round < rounds; ++round)); do
    "$bench" --ranks "$ranks" --rounds 1 --operations all_reduce --json "$work/threads.$ranks.$round.json" >/dev/null
    run_mpi "$ranks" "$bench" --ranks "$ranks" --transport mpi --rounds 1 --operations all_reduce \
      --json "$work/mpi.$ranks.$round.json" >/dev/null
    {
      run_mpi "$ranks" "$work/mpi_allreduce" 60 fresh in_place 8 64 512 4096 32768
      run_mpi "$ranks" "$work/mpi_allreduce" 15 fresh in_place 262144 2097152
      run_mpi "$ranks" "$work/mpi_allreduce" 5 fresh in_place 16777216 67108864
    } >"$work/peer.$ranks.$round.lines"
  done
done

cat >"$work/table.py" <<'EOF'
import collections, glob, json, statistics, sys

work, csv = sys.argv[1], sys.argv[2]
times = collections.defaultdict(list)  # (ranks, bytes, column) -> median us of each round
for path in glob.glob(f"{work}/*.json"):
    for line in json.load(open(path)):
        kind = "shared" if line["algorithm"] == "shared" else "messages " + line["transport"]
        times[line["ranks"], line["bytes"], kind, line["algorithm"]].append(line["median_us"])
for path in glob.glob(f"{work}/*.lines"):
    for text in open(path):
        line = json.loads(text)
        times[line["ranks"], line["bytes"], "Open MPI", ""].append(line["median_us"])
medians = {key: statistics.median(values) for key, values in times.items()}

if csv:
    with open(csv, "w") as file:
        file.write("ranks,bytes,transport,algorithm,median_us,algbw_gigabytes_per_second,busbw_gigabytes_per_second\n")
        for (ranks, size, kind, algorithm), us in sorted(medians.items()):
            rate = size / us / 1e3
            file.write(f"{ranks},{size},{kind},{algorithm},{us:.2f},{rate:.4f},{rate * 2 * (ranks - 1) / ranks:.4f}\n")

def best(ranks, size, kind):
    of_kind = [(us, key[3]) for key, us in medians.items() if key[:3] == (ranks, size, kind)]
    return min(of_kind)

def text(us):
    return f"{us:.1f}" if us < 100 else f"{us:.0f}"

columns = ["shared", "messages threads", "messages mpi", "Open MPI"]
print("| ranks | bytes | shared memory us | GB/s alg | GB/s bus | messages, threads us | by | messages, MPI us | by "
      "| MPI_Allreduce us | GB/s bus | shared, MPI over MPI_Allreduce |")
print("|" + " --- |" * 12)
for ranks, size in sorted({key[:2] for key in medians}):
    shared, threads, mpi, peer = (best(ranks, size, kind) for kind in columns)
    rate, factor = size / shared[0] / 1e3, 2 * (ranks - 1) / ranks
    print(f"| {ranks} | {size} | {text(shared[0])} | {rate:.3g} | {rate * factor:.3g} | {text(threads[0])} | {threads[1]} "
          f"| {text(mpi[0])} | {mpi[1]} | {text(peer[0])} | {size / peer[0] / 1e3 * factor:.3g} "
          f"| {shared[0] / peer[0]:.2f}, {mpi[0] / peer[0]:.2f} |")
EOF
table=$(python3 "$work/table.py" "$work" "$csv")
printf 'All-reduce, fp32: medians of %d rounds; %s, %d cores, %s\n\n%s\n' "$rounds" \
  "$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)" "$(nproc)" "$(mpirun --version | head -n 1)" "$table" |
  tee ${markdown:+"$markdown"}
