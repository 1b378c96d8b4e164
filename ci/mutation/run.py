#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Mutates the optimized code at random places and counts what the suites, and then the unit tests, do not notice. docs/mutation.md says what the kinds are.

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


CONTEXT = 120  # characters on both sides by which a place is found again in a file that has changed


def keep(root, mutants, path):
    rows = []
    for number, file, c in mutants:
        text = (root / file).read_text()
        around = [text[max(0, c.begin - CONTEXT) : c.begin], text[c.begin : c.end], text[c.end : c.end + CONTEXT]]
        rows.append({"number": number, "path": file, "candidate": [c.begin, c.end, c.kind, c.replacement], "around": around})
    path.write_text(json.dumps(rows))


def kept_mutants(root, path):
    """The mutants of an earlier run, at their places in the files as they are now."""
    from places import Candidate

    mutants = []
    for row in json.loads(path.read_text()):
        text, (before, was, after) = (root / row["path"]).read_text(), row["around"]
        begin = text.find(before + was + after)
        if begin < 0:  # half of what is around it
            before, after = before[len(before) // 2 :], after[: len(after) // 2]
            begin = text.find(before + was + after)
        if begin < 0:
            say(f"{row['path']}: the place of mutant {row['number']} is not there any more; its outcome stays")
            continue
        begin += len(before)
        _, _, kind, replacement = row["candidate"]
        mutants.append((row["number"], row["path"], Candidate(begin, begin + len(was), kind, replacement)))
    return mutants


def draw_and_build(arguments, work):
    """(mutants, programs by name). Places that the compiler refuses are drawn again."""
    from build import CompileError, build_programs
    from draw import draw
    from places import Parser

    kept = work / "mutants.json"
    rejected = set()
    mutants = kept_mutants(ROOT, kept) if kept.exists() else None
    while True:
        if mutants is None:
            parser = Parser(ROOT, flags_of(arguments.build))
            mutants = draw(parser, arguments.mutants, arguments.seed, arguments.only, rejected, say)
            keep(ROOT, mutants, kept)
        try:
            return mutants, build_programs(ROOT, arguments.build, work, mutants, say=say)
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
        outcome = row["status"]
        if outcome == "killed":
            outcome += f" by {row['case']} ({row['check']})"
        if outcome == "equivalent":
            outcome += f": {row['reason']}"
        say(f"{row['mutant']:4} {row['kind']:18} {row['place']:58} {outcome}")


def print_counts(rows):
    killed = [row for row in rows if row["status"] == "killed"]
    by_suites = sum(row["by"] == "suites" for row in killed)
    others = {}
    for row in rows:
        if row["status"] != "killed":
            others[row["status"]] = others.get(row["status"], 0) + 1
    rest = "".join(f", {count} {status}" for status, count in sorted(others.items()))
    say(f"{len(rows)} mutants: {by_suites} killed by suites, {len(killed) - by_suites} by unit tests alone{rest}")


def identity(row):
    return [row["place"].rsplit(":", 1)[0], row["kind"], row["was"], row["becomes"]]


class Outcome:
    """The table of mutants, in a file after every change, and how many batches of cases all of them have been through.

    Equivalents: mutants of which somebody has shown that they change nothing that anyone could see, with the reason."""

    def __init__(self, path, seed, mutants, again):
        self.path, self.seed = path, seed
        old = load(path)
        batches = old.get("batches", {})
        self.batches = batches if isinstance(batches, dict) else {"suites": batches}
        rows = {row["mutant"]: row for row in old.get("mutants", [])}
        for number, file, candidate in mutants:
            if number not in rows or number in again:
                rows[number] = {**describe(ROOT, number, file, candidate), "status": "not reached", "cases": 0}
        reasons = {tuple(row["mutant"]): row["reason"] for row in json.loads((HERE / "equivalents.json").read_text())}
        for row in rows.values():
            reason = reasons.get(tuple(identity(row)))
            if reason is not None and row["status"] != "killed":
                row.update(status="equivalent", reason=reason)
        self.rows = [rows[number] for number in sorted(rows)]
        self.again = set(again)

    def save(self):
        self.path.write_text(json.dumps({"seed": self.seed, "batches": self.batches, "mutants": self.rows}, indent=1) + "\n")

    def alive(self):
        return [row for row in self.rows if row["status"] not in ("killed", "equivalent")]


def judge_all(name, tests, outcome, cover_file, cover_again):
    """All living mutants against all cases of one program, in batches."""
    from score import batches, cover_cases, judge

    cover = {} if cover_again else load(cover_file)
    for index, batch in enumerate(batches(tests.cases(), tests.batch)):
        missing = [case for case in batch if case not in cover]
        if missing:
            cover.update(cover_cases(tests, missing))
            cover_file.write_text(json.dumps(cover))
            broken = [case for case in missing if cover[case]["status"] not in ("pass", "skip")]
            if broken:
                say(f"not counted, since they fail without a mutant: {', '.join(broken)}")
        for row in outcome.alive():
            if index < outcome.batches.get(name, 0) and row["mutant"] not in outcome.again and not missing:
                continue
            verdict = judge(tests, row["mutant"], batch, cover, say)
            if verdict["status"] == "not reached":
                continue
            row.update(verdict, cases=row["cases"] + verdict["cases"], by=name)
            if row["status"] == "killed":
                print_table([row])
            outcome.save()
        outcome.batches[name] = max(outcome.batches.get(name, 0), index + 1)
        outcome.save()
        say(f"{len(outcome.alive())} of {len(outcome.rows)} alive after batch {index + 1} of {name}")


def campaign(arguments):
    from score import Suites, UnitTests

    work = arguments.work or ROOT / "build" / "mutation" / f"seed{arguments.seed}"
    work.mkdir(parents=True, exist_ok=True)
    mutants, programs = draw_and_build(arguments, work)
    outcome = Outcome(work / "outcome.json", arguments.seed, mutants, arguments.again)
    for name, program in programs.items():
        tests = Suites(program) if name == "tandem" else UnitTests(program)
        judge_all("suites" if name == "tandem" else name, tests, outcome, work / f"coverage_{name}.json", arguments.cover_again)
    if len(programs) == 1:
        say("this build has no unit tests: the suites alone have judged")
    print_table(outcome.rows)
    print_counts(outcome.rows)
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
