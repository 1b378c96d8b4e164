#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs what the documents and the help texts tell a reader to type, in a scratch folder for each of them, in order of appearance.

    ci/run_docs.py TANDEM [--all] [--only TEXT] [--python PYTHON] [--costs]
    ci/run_docs.py --self-test     plants each kind of fault and demands that it is found

What is run: blocks marked sh or bash, lines with "$ " in other blocks, the column "command" of tables, examples of every --help.
It must end with status 0, unless the comment behind it says "refused: TEXT" (2 and this text) or "exit status N", or the table RULES
below says otherwise. Output that a document shows below its command must be what is printed now, numbers and names of tensors apart.
Every `tandem ...` elsewhere, and whatever is not run, is held against the help: command, options, names of suites, models, clusters.
Without --all what takes long is not run. The last line counts; exit status 1 where anything failed.
"""
import argparse
import dataclasses
import os
import pathlib
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time

import docs_commands

# Words that stand for something of the reader's: (command, word, what stands here for it).
PLACEHOLDERS = [
    (r"", r"\bFILE\.tar\.gz\b", "bundle.tar.gz"),
    (r"tandem golden", r"\bDIR\b(\.\.\.)?", "results/golden/tiny"),
    (r"tandem checkpoint (export|import)", r"\bDIR\b", "exported"),
    (r"--(data|input) FILE\b(?!\.)", r"\bFILE\b", "text.txt"),
    (r"--metrics FILE", r"\bFILE\b", "metrics.jsonl"),
    (r"", r"\bPREFIX\b", "prepared"),
]
# What a command reads and none before it has made in its document: how it comes about here.
MAKERS = {
    "text.txt": "cat README.md docs/*.md > text.txt",
    "A.json": "tandem run data_parallel/ranks2/accum1 --without-peak --out A.json",
    "B.json": "tandem run data_parallel/ranks2/accum1 --without-peak --out B.json",
    "build/result.json": "tandem run data_parallel/ranks2/accum1 --without-peak --out build/result.json",
    "run": "tandem train --data text.txt --steps 20 --out run --set checkpoint_every_steps=10",
    "run/incident-001": "tandem train --steps 30 --out run --set data=2 --set anomaly_action=rollback --set checkpoint_every_steps=5"
                        " --supervise --fault nan@step=12,rank=1,target=weights",
    "exported": "tandem checkpoint export run --out exported",
}
# What is made of the help texts, whose examples are run anyway; what is not of the tree.
LEFT_OUT = {"commands.md", "build", "out", ".git"}
# Options whose value is written, not read.
WRITES = {">", "--out", "--html", "--metrics", "--json", "--junit", "--trace", "--tensorboard", "--write", "--charts", "--data-cache"}
# Output that stands in a block of its own: (document, how it begins, command).
OUTPUTS = [("README.md", "kernels: cpu", "tandem run data_parallel/text")]


@dataclasses.dataclass
class Rule:
    command: str  # what it is about: found in the command
    reason: str   # why it is not run, or may end otherwise
    unless: object = None      # it is run all the same where this says so
    nightly: bool = False      # it is run with --all
    statuses: tuple = (0,)     # with which it may end


def importable(*modules):
    return lambda options: subprocess.run([options.python, "-c", "import " + ", ".join(modules)], capture_output=True).returncode == 0


def installed(program):
    return lambda options: shutil.which(program) is not None


RULES = [
    Rule(r"^(\./)?ci/|^cmake |^ctest ", "builds and tests everything, by itself"),
    Rule(r"^python3 ci/", "a check that takes minutes, by itself"),
    Rule(r"^build/own_technique", "ci/check_install.sh builds and runs it"),
    Rule(r"^build/\w+/.*_bench", "a benchmark: nightly runs it"),
    Rule(r"--backend cuda|--transport nccl", "needs a GPU: ci/gpu.sh"),
    Rule(r"^srun |^torchrun ", "needs a cluster"),
    Rule(r"s3://", "needs an object store: ci/object_store.sh"),
    Rule(r"record_torch_trace|build/trace|transformers", "needs PyTorch and transformers (--python)", unless=importable("torch", "transformers")),
    Rule(r"build/(ranks|joined)", "needs a run of several ranks of another framework"),
    Rule(r"^mpirun ", "needs mpirun", unless=installed("mpirun")),
    Rule(r"tandem compare", "two runs on a machine that others use: worse and too noisy are fair", statuses=(0, 1, 3), unless=lambda options: True),
]


def children_seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Scratch:
    """A folder that looks like the tree with a finished build, and whose files are its own."""

    def __init__(self, options, folder):
        self.options, self.folder = options, pathlib.Path(folder)
        for entry in options.root.iterdir():
            if entry.name not in {"build", "out", ".git"}:
                (self.folder / entry.name).symlink_to(entry)
        for place in ("build/cpu", "build/gpu", "build/quickstart", ".bin"):
            (self.folder / place).mkdir(parents=True)
            (self.folder / place / "tandem").symlink_to(options.tandem)
        # python3 of a command is the interpreter that has the modules.
        (self.folder / ".bin" / "python3").symlink_to(shutil.which(options.python))
        self.environment = {**os.environ, "PATH": f"{self.folder}/.bin:{os.environ['PATH']}", "OMPI_ALLOW_RUN_AS_ROOT": "1",
                            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1"}

    def run(self, text):
        began = children_seconds()
        try:
            done = subprocess.run(["bash", "-c", text], cwd=self.folder, env=self.environment, text=True, errors="replace", timeout=1800,
                                  stdin=subprocess.DEVNULL, capture_output=True, check=False)
        except subprocess.TimeoutExpired:
            done = subprocess.CompletedProcess(text, -1, "", "did not end within half an hour")
        return done, children_seconds() - began

    def make_inputs(self, text):
        """What the command reads and nobody has made."""
        words = docs_commands.words(text)
        for previous, word in zip(words, words[1:]):
            if previous in WRITES or pathlib.Path(previous).name == "tandem" or (self.folder / word).exists():
                continue
            maker = MAKERS.get(word)
            if maker:
                self.make_inputs(maker)
                done, _ = self.run(maker)
                if done.returncode:
                    raise RuntimeError(f"cannot make {word}: {maker}: {done.stderr.strip()}")


class Session:
    def __init__(self, options):
        self.options, self.help = options, docs_commands.Help(options.tandem)
        self.ran, self.mentions, self.skipped, self.failed, self.costs = 0, 0, {}, [], []

    def fail(self, command, what):
        self.failed.append(f"{command.document}:{command.line}: {command.text}\n    {what}")
        print(f"failed   {self.failed[-1]}", flush=True)

    def check_mention(self, command):
        for problem in self.help.problems(command.text):
            self.fail(command, problem)

    def skip(self, command, reason):
        self.skipped[reason] = self.skipped.get(reason, 0) + 1
        path = re.match(r"(?:python3 )?(?:\./)?(ci/[\w/.-]+)", command.text)
        if path and not (self.options.root / path[1]).is_file():
            self.fail(command, f"{path[1]} does not exist")
        elif path:
            source = (self.options.root / path[1]).read_text(encoding="utf-8")
            for option in re.findall(r" (--[\w-]+)", command.text):
                if option not in source:
                    self.fail(command, f"{path[1]} knows no {option}")
        self.check_mention(command)

    def rule(self, text):
        for rule in RULES:
            if re.search(rule.command, text):
                return rule
        return None

    def run(self, scratch, command):
        text = command.text
        for about, word, value in PLACEHOLDERS:
            if re.search(about, text):
                text = re.sub(word, value, text)
        rule = self.rule(text)
        if rule and not (rule.unless and rule.unless(self.options)):
            return self.skip(command, rule.reason)
        if not self.options.all and docs_commands.takes_long(text):
            return self.skip(command, "takes long: --all, nightly")
        try:
            scratch.make_inputs(text)
        except RuntimeError as error:
            return self.fail(command, str(error))
        done, seconds = scratch.run(text)
        self.ran += 1
        self.costs.append((seconds, command))
        return self.judge(command, done, rule.statuses if rule else (0,))

    def judge(self, command, done, statuses):
        expected = command.expected_status
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-3:]
        if expected is not None:
            statuses = (expected,)
        if done.returncode not in statuses:
            return self.fail(command, f"ended with {done.returncode} instead of {statuses[0]}: " + "\n    ".join(said))
        if command.refused and command.refused not in done.stderr:
            return self.fail(command, f"refused, but not with '{command.refused}': " + "\n    ".join(said))
        if command.output:
            for problem in docs_commands.differences(command.output, done.stdout):
                self.fail(command, problem)
        return None

    def run_all(self, name, commands):
        commands = [command for command in commands if command.run]
        if not commands or (self.options.only and self.options.only not in name):
            return
        with tempfile.TemporaryDirectory(prefix="tandem_docs_") as folder:
            scratch = Scratch(self.options, folder)
            for command in commands:
                self.run(scratch, command)

    def check_document(self, path):
        name = path.relative_to(self.options.root).as_posix()
        commands = docs_commands.of_document(name, path.read_text(encoding="utf-8"), OUTPUTS)
        for command in commands:
            if not command.run:
                self.mentions += 1
                self.check_mention(command)
        self.run_all(name, commands)

    def check_help(self):
        for name in self.help.commands():
            for problem in self.help.faults(name):
                self.fail(docs_commands.Command(f"tandem {name} --help", 0, ""), problem)
            self.run_all(f"tandem {name} --help", self.help.examples(name))


def self_test():
    tests = docs_commands.self_tests()
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        docs_commands.write_small_tree(root)
        for fault, replace, by in tests:
            document, text = docs_commands.SMALL_DOCUMENT, docs_commands.SMALL_PROGRAM
            assert fault == "none" or replace in document + text, fault
            (root / "README.md").write_text(document.replace(replace, by) if replace else document, encoding="utf-8")
            (root / "tandem").write_text(text.replace(replace, by) if replace else text, encoding="utf-8")
            done = subprocess.run([sys.executable, __file__, str(root / "tandem"), "--root", str(root)], capture_output=True, text=True, check=False)
            if done.returncode != (0 if fault == "none" else 1):
                sys.exit(f"self-test: {fault}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    print(f"{len(tests)} planted documents, each found as it is")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tandem", nargs="?", type=pathlib.Path, help="the program")
    parser.add_argument("--all", action="store_true", help="also what takes long")
    parser.add_argument("--only", metavar="TEXT", help="documents and help texts whose name has this in it")
    parser.add_argument("--python", default=sys.executable, help="the python3 of commands")
    parser.add_argument("--costs", action="store_true", help="seconds of CPU of each command")
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parent.parent)
    parser.add_argument("--self-test", action="store_true")
    options = parser.parse_args()
    if options.self_test:
        return self_test()
    if options.tandem is None or not os.access(options.tandem, os.X_OK):
        parser.error("needs the program: ci/run_docs.py build/cpu/tandem")
    options.tandem, options.root = options.tandem.resolve(), options.root.resolve()
    began, session = time.monotonic(), Session(options)
    for path in sorted(options.root.rglob("*.md")):
        if not LEFT_OUT.intersection(path.relative_to(options.root).parts):
            session.check_document(path)
    session.check_help()
    if options.costs:
        for seconds, command in sorted(session.costs, key=lambda cost: -cost[0]):
            print(f"{seconds:7.1f} s  {command.document}:{command.line}: {command.text}")
    for reason, count in session.skipped.items():
        print(f"skipped  {count:3} x {reason}")
    print(f"{sum(seconds for seconds, _ in session.costs):.0f} s of CPU in {time.monotonic() - began:.0f} s; {session.mentions} mentions checked")
    print(f"{session.ran} commands run, {sum(session.skipped.values())} skipped, {len(session.failed)} failed")
    return 1 if session.failed else 0


if __name__ == "__main__":
    sys.exit(main())
