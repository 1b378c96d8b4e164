#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks what neither the compiler nor clang-format looks at.

    check_tree.py [--root DIR]    checks the tree
    check_tree.py --self-test     plants each kind of fault in a small tree and demands that it is found

In C++ and CUDA files: an SPDX line first, at most 400 lines a file, at most 60 lines a function. In headers: no type of the same name
as another one of the namespace, since the linker takes either's functions for both, without a word; and no struct or class without any
comment, before it or at a member. In every text file: no absolute path
of somebody's machine, no words that mark unfinished work.
"""

import argparse
import pathlib
import re
import sys
import tempfile

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
CODE = {".cpp", ".h", ".cu", ".cuh"}
TEXT = CODE | {".py", ".sh", ".cmake", ".md", ".json", ".txt", ".supp", ""}
LEFT_OUT = {"build", "out", ".git", ".cache", ".venv", "__pycache__"}

ABSOLUTE_PATH = re.compile(r"""(?<![\w./~}-])/(?:work|root|home|tmp|opt|mnt|Users)/[\w.-]""")
UNFINISHED = re.compile("|".join(rf"\b{word}\b" for word in ("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")))
ACCESS = re.compile(r"\b(?:public|private|protected):")
# What opens a brace without being a function.
NOT_A_FUNCTION = re.compile(r"^\s*(?:namespace|class|struct|union|enum|extern)\b|=\s*$")


# A type of namespace scope; those of reference/ have a namespace of their own, those for tests are linked into one program each.
TYPE = re.compile(r"^(?:struct|class|enum class) (\w+)(?: final)?\s*(?:\{|:[^:])", re.MULTILINE)


# As above, with what stands before it; a specialisation (`struct Of<A> {`) is what its template says.
COMMENTED_TYPE = re.compile(r"^(?:template <[^\n]*>\n)?(?:struct|class) (\w+)(?: final)?\s*(?:\{|:[^:])", re.MULTILINE)


def text_files(root):
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root)
        if path.is_file() and path.suffix in TEXT and not LEFT_OUT.intersection(relative.parts):
            yield path


def blank_out(text):
    """The same text with comments, strings and characters replaced by blanks, lines kept."""
    pattern = re.compile(
        r"""//[^\n]*|/\*.*?\*/|R"(?P<mark>[^()\\\s]*)\(.*?\)(?P=mark)"|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'""",
        re.DOTALL,
    )
    return pattern.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)


def long_functions(text):
    """(line, length) of each outermost function body, signature included, that is too long."""
    macro = re.compile(r"^[ \t]*#(?:[^\n\\]|\\\n|\\)*", re.MULTILINE)
    code = macro.sub(lambda match: "\n" * match.group().count("\n"), blank_out(text))
    found, depth_of_function, stack, head_start = [], None, [], 0
    last_start = None  # of a function that ended just before: a member initialiser a_{1} is followed by more of its constructor
    for position, character in enumerate(code):
        if character == "{":
            head = ACCESS.sub(lambda match: " " * len(match.group()), code[head_start:position])
            start = None
            if depth_of_function is None and last_start is not None and re.match(r"\s*(?:,|$)", head):
                start = last_start
            elif depth_of_function is None and ")" in head and not NOT_A_FUNCTION.search(head.strip()):
                start = head_start + len(head) - len(head.lstrip())
            if start is not None:
                depth_of_function = len(stack)
            stack.append(start)
            last_start = None
        elif character == "}" and stack:
            start = last_start = stack.pop()
            if depth_of_function == len(stack):
                depth_of_function = None
                length = code.count("\n", start, position) + 1
                if length > MAX_FUNCTION_LINES:
                    found.append((code.count("\n", 0, start) + 1, length))
        elif character == ";":
            last_start = None
        if character in "{};":
            head_start = position + 1
    return found


def check_code(name, text):
    problems = []
    num_lines = text.count("\n")
    if not text.startswith("// SPDX-License-Identifier: "):
        problems.append(f"{name}:1: the first line must be the SPDX line")
    if num_lines > MAX_FILE_LINES:
        problems.append(f"{name}: {num_lines} lines; at most {MAX_FILE_LINES}")
    for line, length in long_functions(text):
        problems.append(f"{name}:{line}: a function of {length} lines; at most {MAX_FUNCTION_LINES}")
    return problems


def check_file(root, path):
    name = path.relative_to(root).as_posix()
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return []
    problems = check_code(name, text) if path.suffix in CODE else []
    for number, line in enumerate(text.splitlines(), 1):
        if match := ABSOLUTE_PATH.search(line):
            problems.append(f"{name}:{number}: an absolute path ({line[match.start():].split()[0][:40]})")
        if match := UNFINISHED.search(line):
            problems.append(f"{name}:{number}: '{match.group()}' marks unfinished work")
    return problems


def types_of_one_name(root, files):
    first, problems = {}, []
    for path in files:
        name = path.relative_to(root).as_posix()
        if path.suffix != ".h" or name.startswith("reference/") or "test" in path.stem:
            continue
        for match in TYPE.finditer(path.read_text(encoding="utf-8")):
            other = first.setdefault(match.group(1), name)
            if other != name:
                problems.append(f"{name}: {match.group(1)} is another type in {other}")
    return problems


def types_without_comment(root, files):
    problems = []
    for path in files:
        if path.suffix != ".h" or "test" in path.stem:
            continue
        text = path.read_text(encoding="utf-8")
        for match in COMMENTED_TYPE.finditer(text):
            before = text[: match.start()].rstrip("\n").rsplit("\n", 1)[-1]
            end = text.find("\n};", match.end())
            if not before.lstrip().startswith("//") and "//" not in text[match.end() : end]:
                name = path.relative_to(root).as_posix()
                line = text.count("\n", 0, match.start()) + 1
                problems.append(f"{name}:{line}: {match.group(1)} has no comment: what is it, in which units, who owns what")
    return problems


def check(root):
    files = list(text_files(root))
    problems = [problem for path in files for problem in check_file(root, path)]
    return len(files), problems + types_of_one_name(root, files) + types_without_comment(root, files)


def self_test():
    spdx = "// SPDX-License-Identifier: Apache-2.0\n"
    body = "  call(a, {1, 2});\n"
    planted = [
        ("a.cpp", "int a;\n", "SPDX"),
        ("a.cpp", spdx + "int a;\n" * MAX_FILE_LINES, f"at most {MAX_FILE_LINES}"),
        ("a.cpp", spdx + "namespace n {\nvoid f(int a,\n       int b) {\n" + body * 60 + "}\n}\n", "a function of 63 lines"),
        ("a.h", spdx + "/// C.\nclass C {\n public:\n  C() : a_(1) {\n" + body * 60 + "  }\n};\n", "a function of 62 lines"),
        ("a.cpp", spdx + "C::C(int a)\n    : a_{a}, b_{2} {\n" + body * 60 + "}\n", "a function of 63 lines"),
        ("a.md", "see " + "/" + "work/notes.md\n", "an absolute path"),
        ("a.py", "# TO" + "DO later\n", "unfinished"),
        ("b.h", spdx + "/// A.\nstruct Known {\n};\n", "another type in a.h"),
        ("a.h", spdx + "/// A.\nint a;\n\ntemplate <class T>\nstruct Bare {\n  int a;\n};\nstruct Told {\n  int a;  ///< b\n};\n", "Bare has no"),
    ]
    clean = spdx + "namespace n {\n" + ("void f() {\n" + body * 58 + "}\n") * 3 + "struct S {\n" + "  int a;\n" * 80 + "};\n}\n"
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        for index, (file, text, expected) in enumerate([("a.cpp", clean, None), *planted]):
            root = pathlib.Path(folder) / str(index)
            root.mkdir()
            (root / file).write_text(text)
            if file == "b.h":
                (root / "a.h").write_text(spdx + "/// A.\nclass Known : public Other {\n};\n")
            problems = check(root)[1]
            right = problems == [] if expected is None else any(expected in problem for problem in problems)
            if not right:
                print(f"self-test {index}: expected '{expected}', got {problems}")
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
    print(f"{num_files} files, {len(problems)} problems")
    return 1 if problems or num_files == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
