#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the mirror rule, by which CONTRIBUTING.md says what a new technique touches: every technique that suites/suites.cpp lists has
its suite, its page, its declaration, its row in README.md whose halves exist, and a planted fault that its cases catch.

    check_mirror.py [--root DIR]
    check_mirror.py --self-test     breaks each of these in a copy and demands that it is found
"""

import argparse
import json
import pathlib
import re
import shutil
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Lists that are no technique: the judge's own cases, and cases that belong to the suites of others.
NO_TECHNIQUE = {"harness", "adversary"}


def read(root, name):
    return (root / name).read_text(encoding="utf-8")


def halves_of(row):
    """Paths in the reference and optimized columns of a row of README's table; a bare file name is in the folder of the one before."""
    paths = []
    for column in row.split("|")[2:4]:
        folder = pathlib.Path()
        for name in re.findall(r"`([\w./]+)`", column):
            path = folder / name if "/" not in name else pathlib.Path(name)
            folder = path.parent
            paths.append(path)
    return paths


def problems_of(root):
    techniques = [name for name in re.findall(r"^  add_(\w+)_cases\(cases", read(root, "suites/suites.cpp"), re.MULTILINE)
                  if name not in NO_TECHNIQUE]
    declared = set(re.findall(r"^void add_(\w+)_cases\(", read(root, "suites/suites.h"), re.MULTILINE))
    pitfalls = json.loads(read(root, "suites/pitfalls.json"))["pitfalls"]
    catching = {case.split("/")[0] for pitfall in pitfalls for case in pitfall["caught_by"]}
    rows = dict(re.findall(r"^\| \[(\w+)\]\(docs/techniques/\1\.md\) (\|.*)$", read(root, "README.md"), re.MULTILINE))
    problems = []
    for name in techniques:
        suite = root / "suites" / f"{name}.cpp"
        if not suite.exists() or f"void add_{name}_cases(" not in suite.read_text(encoding="utf-8"):
            problems.append(f"{name}: suites/{name}.cpp, which defines add_{name}_cases(), is missing")
        if not (root / "docs" / "techniques" / f"{name}.md").exists():
            problems.append(f"{name}: docs/techniques/{name}.md is missing")
        if name not in declared:
            problems.append(f"{name}: suites/suites.h does not declare add_{name}_cases()")
        if name not in catching:
            problems.append(f"{name}: suites/pitfalls.json has no fault that its cases catch")
        if name not in rows:
            problems.append(f"{name}: README.md has no row that links docs/techniques/{name}.md")
            continue
        halves = halves_of("|" + rows[name])
        for side in ("reference", "optimized"):
            if not any(path.parts[0] == side for path in halves):
                problems.append(f"{name}: README.md names no {side} half")
        problems += [f"{name}: README.md names {path}, which does not exist" for path in halves if not (root / path).exists()]
    return techniques, problems


def self_test():
    # File, text in it and what that becomes (None: the file goes), and how the report must begin.
    damages = [("suites/zero.cpp", None, "", "zero: suites/zero.cpp"),
               ("docs/techniques/overlap.md", None, "", "overlap: docs/techniques/overlap.md"),
               ("suites/suites.h", "void add_zero_cases(", "void add_zeros_cases(", "zero: suites/suites.h"),
               ("suites/pitfalls.json", '"anomaly/', '"recovery/', "anomaly: suites/pitfalls.json"),
               ("README.md", "docs/techniques/zero.md) |", "docs/techniques/zeros.md) |", "zero: README.md has no row"),
               ("reference/zero.h", None, "", "zero: README.md names reference/zero.h")]
    for file, text, becomes, wanted in damages:
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name in ("suites", "docs", "reference", "optimized"):
                shutil.copytree(ROOT / name, root / name)
            shutil.copy(ROOT / "README.md", root)
            if text is None:
                (root / file).unlink()
            else:
                before = read(root, file)
                assert text in before, (file, text)
                (root / file).write_text(before.replace(text, becomes), encoding="utf-8")
            found = problems_of(root)[1]
            assert any(problem.startswith(wanted) for problem in found), (wanted, found)
    print("self-test passed")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=pathlib.Path, default=ROOT)
    parser.add_argument("--self-test", action="store_true")
    arguments = parser.parse_args()
    if arguments.self_test:
        return self_test()
    techniques, problems = problems_of(arguments.root)
    for problem in problems:
        print(problem)
    print(f"{len(techniques)} techniques, {len(problems)} problems")
    return 1 if problems or not techniques else 0


if __name__ == "__main__":
    sys.exit(main())
