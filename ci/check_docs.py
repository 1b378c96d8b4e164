#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the Markdown files: relative links and headings that they point at exist, and so do the scripts and configurations named
in the command lines that they show (fenced blocks marked sh, bash or console).

    check_docs.py [--root DIR]
"""

import argparse
import pathlib
import re
import sys

LEFT_OUT = {"build", "out", ".git"}
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
# A path of the tree in a command line. What a build or a run makes is not part of the tree.
TREE_PATH = re.compile(r"(?<![\w/.-])(?:\./)?((?:ci|docs|results|suites)/[\w./-]+)")


def anchors_of(text):
    """Anchors of the headings, by GitHub's rule."""
    anchors = set()
    for heading in re.findall(r"^#+\s+(.*)$", FENCE.sub("", text), re.MULTILINE):
        plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        anchors.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return anchors


def check_link(root, path, target):
    if re.match(r"[a-z]+:", target):
        return None
    file, _, anchor = target.partition("#")
    linked = (path.parent / file).resolve() if file else path
    if not linked.exists():
        return f"the link ({target}) leads nowhere"
    if not linked.is_relative_to(root):
        return f"the link ({target}) leads out of the tree"
    if anchor and linked.suffix == ".md" and anchor not in anchors_of(linked.read_text(encoding="utf-8")):
        return f"the link ({target}) names a heading that does not exist"
    return None


def check_file(root, path):
    text = path.read_text(encoding="utf-8")
    name = path.relative_to(root).as_posix()
    problems = []
    for match in LINK.finditer(FENCE.sub(lambda block: "\n" * block.group().count("\n"), text)):
        if problem := check_link(root, path, match.group(1)):
            problems.append(f"{name}: {problem}")
    for language, block in FENCE.findall(text):
        if language not in {"sh", "bash", "console"}:
            continue
        for target in TREE_PATH.findall(block):
            if not (root / target).exists():
                problems.append(f"{name}: a command names {target}, which does not exist")
    return problems


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parent.parent)
    root = parser.parse_args().root.resolve()
    files = [p for p in sorted(root.rglob("*.md")) if not LEFT_OUT.intersection(p.relative_to(root).parts)]
    problems = [problem for path in files for problem in check_file(root, path)]
    for problem in problems:
        print(problem)
    print(f"{len(files)} Markdown files, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
