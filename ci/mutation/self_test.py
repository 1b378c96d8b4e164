# SPDX-License-Identifier: Apache-2.0
"""A small file mutated at every place, each mutant of which must compile, stay silent while it is off, and change what the file
computes, or hang, when it is on; and what must not be mutated is not."""

import pathlib
import subprocess
import tempfile

from places import WEIGHTS, Parser, apply, line_of

HERE = pathlib.Path(__file__).resolve().parent

TEXT = """#include <cstdio>
#include <optional>
#include <stdexcept>
#include <vector>
enum class GroupAxis { world, data, tensor };
struct Work { int* target; int value; void wait() { *target = value; } void wait_host() { *target = value; } };
struct Key { int seed; };
struct Coordinates { int tensor = 1, data = 2; };
int scaled(int a, int b) { return a * b; }
int sum(int a, int b) { return a + b + 100 * a; }
void copy(int from, int& target) { target = from; }
int size_of(GroupAxis axis) { return axis == GroupAxis::world ? 8 : axis == GroupAxis::data ? 4 : 2; }
int peer_of(int rank) { return 3 * rank; }
int planted(int value) { if (value == 12345) throw std::runtime_error("no"); return value; }
constexpr int kTwice = 2 * 21;
std::vector<int> compute() {
  std::vector<int> out;
  int rank = 1, target = 0, copied = 0, seed = 5;
  out.push_back(scaled(6, 7));
  out.push_back(peer_of(rank));
  int begin = 3;
  out.push_back(begin);
  copy(9, copied);
  out.push_back(copied);
  out.push_back(size_of(GroupAxis::data));
  Work work{&target, 4};
  work.wait();
  out.push_back(target);
  const Key key{seed};
  out.push_back(key.seed);
  int below = 0;
  for (int i = 0; i < 3; ++i) below += 10;
  out.push_back(below);
  if (rank == 1) out.push_back(77);
  out.push_back(sum(1, 2));
  target -= 1;
  out.push_back(target);
  const std::optional<int> there = 0;
  if (there) out.push_back(88);
  return out;
}
int main() {
  for (const int value : compute()) std::printf("%d ", value);
}
"""

# Lines that have no place: a check that throws, a constant.
UNTOUCHED = ("planted", "kTwice", "enum class")


def run(program, mutant):
    environment = {"TANDEM_MUTANT": str(mutant)} if mutant else {}
    try:
        done = subprocess.run([str(program)], capture_output=True, text=True, env=environment, timeout=20)
    except subprocess.TimeoutExpired:
        return "hangs"
    return f"{done.returncode} {done.stdout}"


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "small.cpp").write_text(TEXT)
        parser = Parser(folder, ["-std=c++20", "-include", str(HERE / "mutation.h")])
        candidates = [c for c in parser.candidates("small.cpp") if TEXT[: c.begin].count("int main()") == 0]
        lines = TEXT.splitlines()
        for candidate in candidates:
            line = lines[line_of(TEXT, candidate.begin) - 1]
            assert not any(word in line for word in UNTOUCHED), f"mutated: {line}"
        kinds = {c.kind for c in candidates}
        assert kinds == set(WEIGHTS), f"no place of kind {sorted(set(WEIGHTS) - kinds)}"
        seen, programs = {}, 0
        left = list(candidates)
        while left:  # as many in one program as do not overlap
            chosen = []
            for candidate in list(left):
                if all(candidate.end <= c.begin or c.end <= candidate.begin for c in chosen):
                    left.remove(candidate)
                    if parser.compiles("small.cpp", apply(TEXT, [(1, candidate)])):
                        chosen.append(candidate)
            programs += 1
            (folder / "mutated.cpp").write_text(apply(TEXT, list(enumerate(chosen, start=1))))
            subprocess.run(["c++", "-std=c++20", "-O0", "-w", "-include", str(HERE / "mutation.h"), str(folder / "mutated.cpp"),
                            str(HERE / "mutation.cpp"), "-o", str(folder / "program")], check=True)
            right = run(folder / "program", 0)
            for number, candidate in enumerate(chosen, start=1):
                seen.setdefault(candidate.kind, []).append(run(folder / "program", number) != right)
        for kind, shown in sorted(seen.items()):
            print(f"{kind:18} {sum(shown)} of {len(shown)} mutants change what is computed")
        assert set(seen) == set(WEIGHTS) and all(any(shown) for shown in seen.values()), "a kind of mutation changes nothing"
        assert all(seen["negated_condition"]), "a condition, of an optional perhaps, stays as it is"
        assert right.startswith("0 42 3 3 9 4 4 5 30 77 103 3"), right
        print(f"self-test: {sum(map(len, seen.values()))} mutants in {programs} programs")
    return 0
