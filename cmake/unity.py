#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Deals source files to groups that are compiled as one, so that their headers are read once.

    unity.py SIZE FILE...    prints "GROUP FILE" lines, groups numbered from 0
    unity.py --self-test

Files share a group only where no name of an unnamed namespace of one occurs anywhere in another: names that are private to a file
stay so, and nobody has to find names that are unique in a folder.
"""
import pathlib
import re
import sys

# At the start of a line inside an unnamed namespace, in the layout of this project's formatter.
DECLARED = re.compile(
    r"(?:class|struct|enum class|enum|union)\s+(?:\[\[\w+\]\]\s*)?(\w+)"
    r"|using\s+(\w+)\s*="
    r"|namespace\s+(\w+)\s*="
    r"|[^#/(={]*?\b(\w+)\s*(?:\(|=|\{|\[|;)")
WORD = re.compile(r"[A-Za-z_]\w*")
MACROS = {"TEST_F", "TEST_P", "INSTANTIATE_TEST_SUITE_P", "TYPED_TEST", "TYPED_TEST_SUITE"}  # what they make is unique in a program
SAME_EVERYWHERE = {"template", "fs"}
ROOMS = ("core", "kernels", "reference", "optimized", "harness", "suites", "cli")
ATTRIBUTE = re.compile(r"\[\[\w+\]\]\s*")
COMMENT = re.compile(r"//[^\n]*")


def private_names(text):
    """Names declared at the outermost level of unnamed namespaces, and aliases of namespaces anywhere."""
    names = set()
    inside = False
    for line in text.splitlines():
        if line.startswith("namespace {"):
            inside = True
        elif line.startswith("}  // namespace"):
            inside = False
        elif inside and line and not line[0].isspace() and line[0] not in "}#":
            found = DECLARED.match(line)
            name = next((name for name in found.groups() if name), "") if found else ""
            if name and not name.isupper() and name not in MACROS:
                names.add(name)
    names.update(re.findall(r"^#define\s+(\w+)", text, re.M))
    return names - SAME_EVERYWHERE


def public_types(folder):
    """Types that headers declare outside of classes: a file that uses such a name for something of its own is compiled alone."""
    names = set()
    for room in ROOMS:
        for header in (folder / room).rglob("*.h"):
            for line in header.read_text(encoding="utf-8").splitlines():
                found = DECLARED.match(ATTRIBUTE.sub("", line)) if line[:1].isalpha() or line.startswith("[[") else None
                names.update(name for name in (found.groups()[:3] if found else ()) if name)
    return names


def deal(sources, size, public=frozenset()):
    """sources: [(name, text)]. Returns a group number for each."""
    groups = []  # of [members, private names, words]
    result = []
    for _, text in sources:
        private, words = private_names(text), set(WORD.findall(COMMENT.sub("", text)))
        for number, group in enumerate(groups):
            if group[0] < size and not (private & (group[2] | public)) and not (group[1] & (words | public)):
                break
        else:
            number, group = len(groups), [0, set(), set()]
            groups.append(group)
        group[0] += 1
        group[1] |= private
        group[2] |= words
        result.append(number)
    return result


def self_test():
    one = "namespace {\nconstexpr int kSize = 3;\nint helper(int x) {\n  return x;\n}\n}  // namespace\n"
    same = "namespace {\nstruct helper {};\n}  // namespace\n"
    uses = "int f() { return helper(2); }\n"
    apart = "namespace {\nint other() { return 1; }\n}  // namespace\n"
    after = "namespace {\n}  // namespace\nint later() { return 1; }\n"
    checks = [
        private_names(after) == set(),
        private_names(one) == {"kSize", "helper"},
        deal([("a", one), ("b", same)], 8) == [0, 1],
        deal([("a", one), ("b", uses)], 8) == [0, 1],
        deal([("a", one), ("b", apart)], 8) == [0, 0],
        deal([("a", one), ("b", apart), ("c", "int g();\n")], 2) == [0, 0, 1],
        deal([("a", one), ("b", apart)], 8, {"kSize"}) == [0, 1],
        deal([("a", apart), ("b", one)], 8, {"kSize"}) == [0, 1],
        deal([("a", one), ("b", "// helper\nint g();\n")], 8) == [0, 0],
    ]
    print(f"self-test: {sum(checks)} of {len(checks)} right")
    return 0 if all(checks) else 1


def main():
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    size, files = int(sys.argv[1]), sys.argv[2:]
    sources = []
    for file in files:
        with open(file, encoding="utf-8") as stream:
            sources.append((file, stream.read()))
    public = public_types(pathlib.Path(__file__).resolve().parent.parent)
    for number, (file, _) in zip(deal(sources, size, public), sources):
        print(number, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
