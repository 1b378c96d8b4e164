#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fails on an #include against the arrows of the house, on a circular one, and on a library outside its room.

    check_includes.py [--root DIR]      checks the tree, and that the graph in docs/architecture.md is the tree's
    check_includes.py --graph           prints that graph: the rooms, and the folders of optimized/
    check_includes.py --self-test       plants wrong includes in a copy of a small tree and demands that each is found

Inside a room a folder may include those on lower floors, where the room's floors are declared, else the folders around it. Source files
may include their folder's subfolders too: they choose among them.

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

# The folders of a room, lowest floor first; those on one floor do not know each other. "." is what lies in the room itself.
FLOORS = {
    "optimized": [
        ["collectives", "context_parallel", "expert_parallel", "memory", "monitoring", "pipeline_parallel", "storage", "tensor_parallel"],
        ["comm"],
        ["comm/adversary", "comm/threads"],
        ["comm/messages"],
        ["comm/mpi"],
        ["comm/nccl"],
        ["."],
        ["compression", "data_pipeline", "hybrid_parallel", "loss_scaling"],
        ["data_parallel"],
        ["zero"],
        ["engine"],
        ["checkpoint", "scaling"],
        ["anomaly", "probe", "recovery"],
        ["training"],
    ],
    # simt/ stands in for CUDA's own headers and runtime, so that each of the two includes the other.
    "kernels": [["."], ["cpu/simd"], ["cpu"], ["cuda", "simt"], ["cuda/bench"]],
}
ONE_FOLDER = [{"kernels/cuda", "kernels/simt"}]

GRAPH_IN = "docs/architecture.md"
OWN_FILES = "own_files"  # of optimized/ itself
GRAPH_BLOCK = re.compile(r"```mermaid\n.*?```\n", re.DOTALL)

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


def folder_of(name):
    return name.rsplit("/", 1)[0]


def floor_of(folder):
    """The number of the floor, from 0 at the bottom; None where none is declared."""
    room, _, inner = folder.partition("/")
    return next((floor for floor, folders in enumerate(FLOORS.get(room, [])) if (inner or ".") in folders), None)


def folder_problem(where, name, target):
    """What is wrong with an include between two folders of one room, or None."""
    here, there = folder_of(name), folder_of(target)
    if here == there or {here, there} in ONE_FOLDER or (there.startswith(here + "/") and name.endswith(".cpp")):
        return None
    floors = floor_of(here), floor_of(there)
    if None not in floors:
        return None if floors[0] > floors[1] else f"{where}: {here} must not include {there} ({target}), which is on no lower floor"
    if here.startswith(there + "/"):
        return None
    if there.startswith(here + "/"):
        return f"{where}: a header must not include its folder's subfolder ({target}); a source file may"
    unknown = here if floors[0] is None else there
    return f"{where}: {unknown} has no floor; declare it in FLOORS of ci/check_includes.py ({target})"


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
        if target_room == room and not is_exempt(path) and (problem := folder_problem(where, name, target)):
            problems.append(problem)
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


def without_detours(arrows):
    """The arrows (from -> set of to) but those that others make up together; there must be no circle."""

    def reachable(node):
        found, left = set(), list(arrows.get(node, ()))
        while left:
            if (next_node := left.pop()) not in found:
                found.add(next_node)
                left += arrows.get(next_node, ())
        return found

    return {node: {to for to in tos if not any(to in reachable(other) for other in tos - {to})} for node, tos in arrows.items()}


def box_of(name):
    """What a file belongs to in the graph: a folder of optimized/ with its subfolders, that room's own files, or a whole room."""
    room, *inner = name.split("/")
    if room != "optimized":
        return room
    return inner[0] if len(inner) > 1 else OWN_FILES


def graph(root):
    """The include graph in Mermaid's language: from who includes to what is included, arrows that follow from others left out."""
    files = [path for path in house_files(root) if not is_exempt(path)]
    arrows = {box_of(path.relative_to(root).as_posix()): set() for path in files}
    for path in files:
        here = box_of(path.relative_to(root).as_posix())
        for _, target in INCLUDE.findall(path.read_text(encoding="utf-8", errors="replace")):
            there = box_of(target)
            if here != there and there in arrows and (root / target).is_file():
                arrows[here].add(there)
    lines = ["flowchart TD", "  subgraph optimized"]
    lines += [f"    {box}" + ('["optimized/*.h"]' if box == OWN_FILES else "") for box in sorted(arrows) if box not in ARROWS]
    lines.append("  end")
    lines += [f"  {box} --> {' & '.join(sorted(targets))}" for box, targets in sorted(without_detours(arrows).items()) if targets]
    return "\n".join(lines) + "\n"


def graph_problems(root):
    if not (root / GRAPH_IN).is_file():
        return []
    drawn = GRAPH_BLOCK.search((root / GRAPH_IN).read_text(encoding="utf-8"))
    if drawn and drawn.group() == f"```mermaid\n{graph(root)}```\n":
        return []
    return [f"{GRAPH_IN}: its include graph is not the tree's; put there what ci/check_includes.py --graph prints"]


def check(root):
    files = house_files(root)
    edges = {}
    problems = [problem for path in files for problem in check_file(root, path, edges)] + cycles(edges)
    return len(files), problems if problems else graph_problems(root)


def write_small_tree(root):
    for room in ARROWS:
        (root / room).mkdir(parents=True)
        (root / room / "a.h").write_text("#pragma once\n")
    (root / "optimized/a.cpp").write_text('#include "core/a.h"\n#include "kernels/a.h"\n')
    (root / "kernels/a_test.cpp").write_text('#include "reference/a.h"\n')
    for folder in ("optimized/engine", "optimized/zero", "optimized/comm/mpi", "optimized/novel", "harness/report", "docs"):
        (root / folder).mkdir(parents=True)
    for folder in ("optimized/engine", "optimized/comm/mpi", "harness/report"):
        (root / folder / "a.h").write_text("#pragma once\n")
    (root / "optimized/comm/a.cpp").write_text('#include "optimized/comm/mpi/a.h"\n')
    (root / "optimized/comm/mpi/a.cpp").write_text('#include "optimized/comm/mpi/a.h"\n')
    (root / "optimized/engine/a.cpp").write_text('#include "optimized/a.h"\n#include "optimized/comm/mpi/a.h"\n')
    (root / "harness/report/a.cpp").write_text('#include "harness/a.h"\n')
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
        ("optimized/zero/b.h", '#include "optimized/engine/a.h"\n', "must not include optimized/engine"),
        ("optimized/comm/b.h", '#include "optimized/comm/mpi/a.h"\n', "must not include optimized/comm/mpi"),
        ("optimized/comm/b.cpp", '#include "optimized/a.h"\n', "must not include optimized (optimized/a.h)"),
        ("optimized/novel/b.h", '#include "optimized/engine/a.h"\n', "optimized/novel has no floor"),
        ("harness/b.h", '#include "harness/report/a.h"\n', "a header must not include its folder's subfolder"),
        ("docs/architecture.md", "```mermaid\nflowchart TD\n```\n", "its include graph is not the tree's"),
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
    parser.add_argument("--graph", action="store_true")
    parser.add_argument("--self-test", action="store_true")
    arguments = parser.parse_args()
    if arguments.self_test:
        return self_test()
    if arguments.graph:
        print(graph(arguments.root), end="")
        return 0
    num_files, problems = check(arguments.root)
    for problem in problems:
        print(problem)
    print(f"{num_files} files, {len(problems)} wrong includes")
    return 1 if problems or num_files == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
