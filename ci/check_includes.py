#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fails on an #include against the arrows of the house, on a circular one, and on a library outside its room.

    check_includes.py [--root DIR]      checks the tree
    check_includes.py --self-test       plants wrong includes in a copy of a small tree and demands that each is found

Tests (x_test.cpp), what only they use (test_support.h, x_test_support.h) and benchmarks (x_bench.cpp) are exempt from the arrows, since they compare
rooms.
"""

import argparse
import pathlib
import re
import sys
import tempfile

# A room may include itself and these.
ARROWS = {
    "core": [],
    "kernels": ["core"],
    "reference": ["core"],
    "optimized": ["core", "kernels"],
    "harness": ["core"],
    "suites": ["core", "reference", "optimized", "harness"],
    "cli": ["core", "suites", "harness", "optimized"],
}

# Libraries that belong to some rooms only, or to .cpp files only since they are slow to compile.
ROOMS_OF_LIBRARY = {
    "CLI/": ["cli"],
    "oneapi/": ["kernels"],
    "cblas.h": ["kernels"],
    "omp.h": ["kernels"],
    "cuda": ["kernels", "optimized"],
    "nccl": ["optimized"],
    "mpi.h": ["optimized"],
}
SOURCE_ONLY = ["nlohmann/json.hpp", "rapidjson/"]

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', re.MULTILINE)
GENERATED = re.compile(r"tandem_\w+\.h$")  # made by CMake in the build folder; no file of the tree lacks a folder
SUFFIXES = {".cpp", ".h", ".cu", ".cuh"}


def is_exempt(path):
    return bool(re.search(r"_(test|bench)\.(cpp|cu)$|(^|_)test_support\.(h|cpp)$", path.name))


def house_files(root):
    files = []
    for room in ARROWS:
        files += [p for p in (root / room).rglob("*") if p.suffix in SUFFIXES] if (root / room).is_dir() else []
    return sorted(files)


def library_problems(where, path, room, target):
    problems = []
    for prefix, rooms in ROOMS_OF_LIBRARY.items():
        if target.startswith(prefix) and room not in rooms:
            problems.append(f"{where}: <{target}> belongs into {' and '.join(rooms)}, not into {room}")
    if path.suffix in {".h", ".cuh"} and any(target.startswith(prefix) for prefix in SOURCE_ONLY):
        problems.append(f"{where}: <{target}> is slow to compile; include it in .cpp files only")
    return problems


def check_file(root, path, edges):
    """Problems of one file; notes its includes in `edges`."""
    problems = []
    name = path.relative_to(root).as_posix()
    room = name.split("/", 1)[0]
    text = path.read_text(encoding="utf-8", errors="replace")
    for match in INCLUDE.finditer(text):
        quote, target = match.groups()
        where = f"{name}:{text.count(chr(10), 0, match.start(1)) + 1}"
        target_room = target.split("/", 1)[0]
        if quote == "<":
            if target_room in ARROWS and (root / target).exists():
                problems.append(f"{where}: <{target}> is a file of the house; write it in quotes")
            elif not is_exempt(path):
                problems += library_problems(where, path, room, target)
            continue
        if GENERATED.match(target):
            continue
        if not (root / target).is_file():
            problems.append(f'{where}: "{target}" is no file; paths start at the root of the tree')
            continue
        edges.setdefault(name, []).append(target)
        if target_room != room and target_room not in ARROWS[room] and not is_exempt(path):
            allowed = ", ".join([room, *ARROWS[room]])
            problems.append(f"{where}: {room} must not include {target_room} ({target}); it may include: {allowed}")
        if is_exempt(pathlib.PurePath(target)) and not is_exempt(path):
            problems.append(f"{where}: {target} is for tests only")
    return problems


def cycles(edges):
    """One message for each circular chain of includes, found by depth-first search."""
    problems, done, trail = [], set(), []

    def visit(name):
        if name in trail:
            problems.append("circular include: " + " -> ".join([*trail[trail.index(name):], name]))
            return
        if name in done:
            return
        trail.append(name)
        for target in edges.get(name, []):
            visit(target)
        trail.pop()
        done.add(name)

    for name in sorted(edges):
        visit(name)
    return problems


def check(root):
    files = house_files(root)
    edges = {}
    problems = [problem for path in files for problem in check_file(root, path, edges)]
    return len(files), problems + cycles(edges)


def write_small_tree(root):
    for room in ARROWS:
        (root / room).mkdir(parents=True)
        (root / room / "a.h").write_text("#pragma once\n")
    (root / "optimized/a.cpp").write_text('#include "core/a.h"\n#include "kernels/a.h"\n')
    (root / "kernels/a_test.cpp").write_text('#include "reference/a.h"\n')
    (root / "suites/a.cpp").write_text('#include "reference/a.h"\n#include "optimized/a.h"\n#include "harness/a.h"\n')


def self_test():
    planted = [
        ("reference/b.cpp", '#include "optimized/a.h"\n', "reference must not include optimized"),
        ("optimized/b.cpp", '#include "reference/a.h"\n', "optimized must not include reference"),
        ("harness/b.cpp", '#  include "suites/a.h"\n', "harness must not include suites"),
        ("core/b.h", '#include "kernels/a.h"\n', "core must not include kernels"),
        ("suites/b.cpp", '#include "kernels/a.h"\n', "suites must not include kernels"),
        ("cli/b.cpp", '#include "reference/a.h"\n', "cli must not include reference"),
        ("core/c.h", '#include "core/a.h"\n#include "core/d.h"\n', '"core/d.h" is no file'),
        ("core/a.h", '#include "core/a.h"\n', "circular include: core/a.h -> core/a.h"),
        ("core/e.h", "#include <nlohmann/json.hpp>\n", "slow to compile"),
        ("harness/c.cpp", "#include <CLI/CLI.hpp>\n", "belongs into cli"),
        ("harness/d.cpp", "#include <core/a.h>\n", "write it in quotes"),
    ]
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder) / "clean"
        write_small_tree(root)
        if check(root)[1]:
            print(f"self-test: the clean tree is refused: {check(root)[1]}")
            failures += 1
        for index, (file, text, expected) in enumerate(planted):
            root = pathlib.Path(folder) / str(index)
            write_small_tree(root)
            (root / file).write_text(text)
            problems = check(root)[1]
            if not any(expected in problem for problem in problems):
                print(f"self-test: {file} with {text!r} was not found; expected '{expected}', got {problems}")
                failures += 1
    print(f"self-test: {len(planted) + 1 - failures} of {len(planted) + 1} right")
    return 1 if failures else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parent.parent)
    parser.add_argument("--self-test", action="store_true")
    arguments = parser.parse_args()
    if arguments.self_test:
        return self_test()
    num_files, problems = check(arguments.root)
    for problem in problems:
        print(problem)
    print(f"{num_files} files, {len(problems)} wrong includes")
    return 1 if problems or num_files == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
