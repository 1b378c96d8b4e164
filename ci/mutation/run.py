#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Mutates the optimized code at random places and counts what the suites do not notice. docs/mutation.md says what the kinds are.

    ci/mutation/run.py --mutants 100 --seed 1          draws, builds, runs; the outcome goes to build/mutation/seed1/outcome.json
    ci/mutation/run.py --seed 1 --again 7,31           the same mutants, but only these are run again (a suite has changed)
    ci/mutation/run.py --self-test                     mutates a small file in every way and demands that each mutant shows

Needs python3-clang-14 and a build (--build; default build/cpu, else build/quickstart) whose sources have not changed since. Exit status
1 where more than --allowed mutants survive, 77 where something needed is missing.
"""

import argparse
import importlib.util
import json
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SKIPPED = 77
sys.path.insert(0, str(HERE))


def skip(reason):
    print(f"mutation: skipped: {reason}")
    sys.exit(SKIPPED)


def say(text):
    print(text, flush=True)


def flags_of(build):
    """What clang needs to read the optimized files; definitions and folders of the build's own compilations."""
    wanted = set()
    for entry in json.loads((build / "compile_commands.json").read_text()):
        if re.search(r"tandem_(optimized|scaling|kernels)", entry["command"]):
            wanted.update(re.findall(r"-[DI]\S+", entry["command"]))
            wanted.update("-isystem" + folder for folder in re.findall(r"-isystem (\S+)", entry["command"]))
    wanted -= {"-DNDEBUG"}
    return ["-std=c++20", "-w", f"-I{ROOT}", "-include", str(HERE / "mutation.h"), *sorted(wanted)]


def describe(root, number, path, candidate):
    from places import line_of

    text = (root / path).read_text()
    squeezed = re.sub(r"\s+", " ", text[candidate.begin : candidate.end])
    mutant = re.sub(r"::tandem_mutation::(on\(@\))", r"\1", re.sub(r"\s+", " ", candidate.replacement))
    place = f"{path}:{line_of(text, candidate.begin)}"
    return {"mutant": number, "kind": candidate.kind, "place": place, "was": squeezed[:160], "becomes": mutant[:240]}


def draw_and_build(arguments, work):
    """(mutants, program). Places that the compiler refuses are drawn again."""
    from build import CompileError, build_program
    from draw import draw
    from places import Candidate, Parser, apply, line_of

    kept = work / "mutants.json"
    rejected = set()
    mutants = [(m["number"], m["path"], Candidate(*m["candidate"])) for m in json.loads(kept.read_text())] if kept.exists() else None
    while True:
        if mutants is None:
            parser = Parser(ROOT, flags_of(arguments.build))
            mutants = draw(parser, arguments.mutants, arguments.seed, arguments.only, rejected, say)
            rows = [{"number": n, "path": p, "candidate": [c.begin, c.end, c.kind, c.replacement]} for n, p, c in mutants]
            kept.write_text(json.dumps(rows))
        try:
            return mutants, build_program(ROOT, arguments.build, work, mutants, say=say)
        except CompileError as error:
            say(str(error))
            refused = set()
            for path, line in error.lines:
                text = (work / "tree" / path).read_text().splitlines()[line - 1]
                numbers = {int(n) for n in re.findall(r"tandem_mutation::on\((\d+)\)", text)}
                refused |= {(p, c.begin, c.replacement) for n, p, c in mutants if n in numbers}
            if not refused:
                raise SystemExit("mutation: the build failed, and no mutant is to blame") from None
            rejected |= refused
            mutants = None


def load(path):
    return json.loads(path.read_text()) if path.exists() else {}


def print_table(rows):
    for row in rows:
        outcome = row["status"] + (f" by {row['case']} ({row['check']})" if row["status"] == "killed" else "")
        say(f"{row['mutant']:4} {row['kind']:18} {row['place']:58} {outcome}")
    counts = {}
    for row in rows:
        counts[row["status"]] = counts.get(row["status"], 0) + 1
    if len(rows) > 1:
        say(", ".join(f"{count} {status}" for status, count in sorted(counts.items())))


class Outcome:
    """The table of mutants, in a file after every change; how many batches of cases all of them have been through."""

    def __init__(self, path, seed, mutants, again):
        self.path, self.seed = path, seed
        old = load(path)
        self.batches = old.get("batches", 0)
        rows = {row["mutant"]: row for row in old.get("mutants", [])}
        for number, file, candidate in mutants:
            if number not in rows or number in again:
                rows[number] = {**describe(ROOT, number, file, candidate), "status": "not reached", "cases": 0}
        self.rows = [rows[number] for number in sorted(rows)]
        self.again = set(again)

    def save(self):
        self.path.write_text(json.dumps({"seed": self.seed, "batches": self.batches, "mutants": self.rows}, indent=1) + "\n")

    def alive(self):
        return [row for row in self.rows if row["status"] != "killed"]


def campaign(arguments):
    from score import batches, cover_cases, judge, quick_cases

    work = arguments.work or ROOT / "build" / "mutation" / f"seed{arguments.seed}"
    work.mkdir(parents=True, exist_ok=True)
    mutants, program = draw_and_build(arguments, work)
    cover_file = work / "coverage.json"
    outcome = Outcome(work / "outcome.json", arguments.seed, mutants, arguments.again)
    cases = quick_cases(program)
    cover = {} if arguments.cover_again else load(cover_file)
    for index, batch in enumerate(batches(cases, 40)):
        missing = [case for case in batch if case not in cover]
        if missing:
            cover.update(cover_cases(program, missing))
            cover_file.write_text(json.dumps(cover))
            broken = [case for case in missing if cover[case]["status"] not in ("pass", "skip")]
            if broken:
                say(f"not counted, since they fail without a mutant: {', '.join(broken)}")
        for row in outcome.alive():
            if index < outcome.batches and row["mutant"] not in outcome.again and not missing:
                continue
            verdict = judge(program, row["mutant"], batch, cover, say)
            if verdict["status"] == "not reached":
                continue
            row.update(verdict, cases=row["cases"] + verdict["cases"])
            if row["status"] == "killed":
                print_table([row])
            outcome.save()
        outcome.batches = max(outcome.batches, index + 1)
        outcome.save()
        say(f"{len(outcome.alive())} of {len(mutants)} alive after batch {index + 1} of cases")
    print_table(outcome.rows)
    return 1 if len(outcome.alive()) > arguments.allowed else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--build", type=pathlib.Path, help="a current build of the tandem program")
    parser.add_argument("--work", type=pathlib.Path, help="where to work; default build/mutation/seedN")
    parser.add_argument("--only", help="only files that match this expression")
    parser.add_argument("--again", type=lambda text: [int(n) for n in text.split(",")], default=[], help="judge these mutants again")
    parser.add_argument("--cover-again", action="store_true", help="find out again which case reaches which mutant")
    parser.add_argument("--allowed", type=int, default=5, help="survivors that are no failure")
    parser.add_argument("--self-test", action="store_true")
    arguments = parser.parse_args()
    sys.path.append("/usr/lib/python3/dist-packages")
    if importlib.util.find_spec("clang") is None:
        skip("python3-clang-14 is not installed (ci/setup.sh --all)")
    if arguments.self_test:
        import self_test

        return self_test.main()
    if arguments.build is None:
        builds = [ROOT / "build" / name for name in ("cpu", "quickstart")]
        arguments.build = next((build for build in builds if (build / "build.ninja").exists()), None)
    if arguments.build is None:
        skip("no build here (cmake --preset cpu && cmake --build build/cpu --target tandem), or name one with --build")
    arguments.build = arguments.build.resolve()
    if subprocess.run(["ninja", "--version"], capture_output=True).returncode != 0:
        skip("ninja is not installed")
    return campaign(arguments)


if __name__ == "__main__":
    sys.exit(main())
