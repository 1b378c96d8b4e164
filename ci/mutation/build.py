# SPDX-License-Identifier: Apache-2.0
"""Builds one `tandem` with all mutants: of an existing build, what contains a mutated file is compiled again into a folder of its own
and put into copies of the libraries. The tree and that build stay as they are."""

import concurrent.futures
import functools
import json
import pathlib
import re
import shlex
import shutil
import subprocess

from places import apply

HERE = pathlib.Path(__file__).resolve().parent

FOLDER_OF = {"kernels_test": "kernels", "optimized_test": "optimized", "scaling_test": "optimized/scaling"}
TEST_PROGRAMS = list(FOLDER_OF)

# Tells the switches where cases begin and end.
HOOK = ("    CaseResult result = run_case(entry, options);\n",
        "    ::tandem_mutation::begin_case(entry.name.c_str());\n"
        "    CaseResult result = run_case(entry, options);\n"
        "    ::tandem_mutation::end_case(entry.name.c_str(), std::string(name(result.verdict.status)).c_str(),\n"
        "                                result.verdict.check.c_str(), result.seconds);\n")


class CompileError(Exception):
    """A group of files was refused; `lines`: (path of the tree, line) named by the compiler."""

    def __init__(self, output, lines):
        super().__init__(output)
        self.lines = lines


def write_overlay(root, overlay, mutants):
    """The mutated files, and the runner with its hook, at their paths below `overlay`. Returns their paths."""
    shutil.rmtree(overlay, ignore_errors=True)
    texts = {}
    for number, path, candidate in mutants:
        texts.setdefault(path, []).append((number, candidate))
    result = {path: apply((root / path).read_text(), items) for path, items in texts.items()}
    runner = (root / "harness/runner.cpp").read_text()
    if runner.count(HOOK[0]) != 1:
        raise SystemExit("mutation: harness/runner.cpp has changed; build.py no longer finds where a case begins")
    result["harness/runner.cpp"] = runner.replace(*HOOK)
    for path, text in result.items():
        (overlay / path).parent.mkdir(parents=True, exist_ok=True)
        (overlay / path).write_text(text)
    return sorted(result)


def includes_of(path, text, headers):
    return [header for header in headers if f'#include "{header}"' in text]


def tasks(root, build, overlay, changed):
    """[(source to compile, command, object)] of all compilations that see a changed file."""
    headers = [path for path in changed if path.endswith(".h")]
    # Headers include headers of the same folder: one that includes a changed one counts as changed.
    for header in list(headers):
        for other in (root / header).parent.glob("*.h"):
            relative = other.relative_to(root).as_posix()
            if relative not in headers and includes_of(relative, other.read_text(), headers):
                headers.append(relative)
    found = []
    for entry in json.loads((build / "compile_commands.json").read_text()):
        source = pathlib.Path(entry["file"])
        output = re.search(r" -o (\S+)", entry["command"])
        if output is None or not source.exists() or re.search(r"_test\.dir|_bench\.dir|\.cu\b|simt", output.group(1)):
            continue
        text = source.read_text()
        unity = source.suffix == ".cxx"
        relative = None if unity else (source.relative_to(root).as_posix() if source.is_relative_to(root) else None)
        hit = [path for path in changed if f'#include "{root}/{path}"' in text] if unity else [path for path in changed if path == relative]
        if not hit and not (relative and includes_of(relative, text, headers)):
            continue
        found.append((entry, source, pathlib.Path(output.group(1)), unity, text, hit))
    return found


@functools.lru_cache
def header_state(root):
    """Changes where a header of the tree does."""
    headers = [path for folder in ("core", "kernels", "optimized", "harness", "suites") for path in sorted((root / folder).rglob("*.h"))]
    return "".join(f"{path}{path.stat().st_mtime_ns}" for path in headers)


def compile_one(root, overlay, objects, task, optimize):
    entry, source, output, unity, text, hit = task
    target = objects / output
    target.parent.mkdir(parents=True, exist_ok=True)
    if unity:
        copy = target.with_suffix(".cxx")
        for path in hit:
            text = text.replace(f'"{root}/{path}"', f'"{overlay}/{path}"')
        if not copy.exists() or copy.read_text() != text:
            copy.write_text(text)
        source_now = copy
    else:
        source_now = overlay / hit[0] if hit else source
    words = shlex.split(entry["command"])
    words = [word for word in words if word not in (str(source), "-Werror", "-c")]
    words[words.index("-o") + 1] = str(target)
    hot = "/simd/" in str(source)
    flags = ["-w", "-I" + str(overlay), "-include", str(HERE / "mutation.h")]
    words[1:1] = flags
    words += [] if hot else [optimize]
    words += ["-c", str(source_now)]
    stamp = target.with_suffix(".stamp")
    mutated = sorted(path.relative_to(overlay).as_posix() for path in overlay.rglob("*") if path.is_file())
    key = " ".join(words) + text + "".join((overlay / path).read_text() for path in mutated if path in hit or path.endswith(".h"))
    # And what has not been mutated, in case it has changed since.
    beside = [pathlib.Path(name) for name in re.findall(r'^#include "(/.+?)"', text, re.MULTILINE)] if unity else [source]
    key += "".join(path.read_text() for path in beside if not path.is_relative_to(overlay)) + header_state(HERE.parents[1])
    if target.exists() and stamp.exists() and stamp.read_text() == key:
        return target
    done = subprocess.run(["nice", "-n", "10", *words], cwd=entry["directory"], capture_output=True, text=True)
    if done.returncode != 0:
        lines = re.findall(rf"{re.escape(str(overlay))}/(\S+?):(\d+):\d+: error", done.stderr)
        raise CompileError(done.stderr[-3000:], [(path, int(line)) for path, line in lines])
    stamp.write_text(key)
    return target


def compiled(build, work, source):
    """An object of this folder's own file."""
    target = work / (source + ".o")
    subprocess.run(["c++", "-std=c++20", "-O1", "-c", str(HERE / source), "-o", str(target)], check=True)
    return target


def link(build, work, changed_objects, target, own):
    """changed_objects: path in the build -> new object; own: objects in front. Returns the program, or None: the build has none."""
    found = subprocess.run(["ninja", "-C", str(build), "-t", "commands", target], capture_output=True, text=True)
    line = next((line for line in reversed(found.stdout.splitlines()) if re.search(rf"-o ([\w/]+/)?{target}\b", line)), None)
    if line is None:
        return None
    program = work / target
    words = []
    by_archive = {}
    for path, new in changed_objects.items():
        folder = str(path).split("/CMakeFiles/")[0]
        by_archive.setdefault(folder, []).append(new)
    for word in shlex.split(line.split("&&")[1]):
        if word.endswith(".a") and not word.startswith("/"):
            new = by_archive.get(str(pathlib.Path(word).parent))
            if new:
                copy = work / pathlib.Path(word).name
                shutil.copy(build / word, copy)
                subprocess.run(["ar", "r", str(copy), *map(str, new)], check=True, capture_output=True)
                word = str(copy)
        words.append(word)
    words[words.index("-o") + 1] = str(program)
    words[1:1] = map(str, own)
    done = subprocess.run(["nice", "-n", "10", *words], cwd=build, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"mutation: {target} was not linked:\n{done.stderr[-3000:]}")
    return program


def build_programs(root, build, work, mutants, optimize="-O1", say=print):
    """{"tandem": program, and of each of TEST_PROGRAMS that the build has, its path}, all with all mutants."""
    overlay, objects = work / "tree", work / "objects"
    changed = write_overlay(root, overlay, mutants)
    todo = tasks(root, build, overlay, changed)
    reached = {path for task in todo for path in task[5]}
    missing = [path for path in changed if path.endswith(".cpp") and path not in reached]
    if missing:
        raise SystemExit(f"mutation: not part of the build: {', '.join(missing)}")
    say(f"compiles {len(todo)} of the build's files")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        built = list(pool.map(lambda task: compile_one(root, overlay, objects, task, optimize), todo))
    objects = {task[2]: target for task, target in zip(todo, built)}
    switches = compiled(build, work, "mutation.cpp")
    programs = {"tandem": link(build, work, objects, "tandem", [switches])}
    if programs["tandem"] is None:
        raise SystemExit(f"mutation: {build} has no tandem program")
    hook = compiled(build, work, "test_hook.cpp")
    for name in TEST_PROGRAMS:
        program = link(build, work, objects, name, [switches, hook]) if (build / FOLDER_OF[name] / name).exists() else None
        if program is not None:
            programs[name] = program
    return programs
