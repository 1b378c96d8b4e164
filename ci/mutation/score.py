# SPDX-License-Identifier: Apache-2.0
"""Runs suites, and unit tests, against mutants: one process for a mutant and a batch of the cases that reach it, cheapest first, until one fails."""

import json
import os
import pathlib
import resource
import signal
import subprocess
import tempfile
import time



class Suites:
    """The quick cases of the tandem program."""

    batch, part = 40, 8  # cases for all mutants at a time; cases of one process

    def __init__(self, program):
        self.program = program

    def command(self, cases, folder):
        return [str(self.program), "run", "--quick", "--without-peak", "--repetitions", "1", *cases]

    def cases(self):
        text = subprocess.run([str(self.program), "list", "--json", "-"], capture_output=True, text=True, check=True).stdout
        return [case["case"] for case in json.loads(text)["cases"] if case["quick"]]


class UnitTests:
    """The tests of a Google Test program."""

    batch, part = 1 << 30, 30  # they are short: the cheapest that reach a mutant come first

    def __init__(self, program):
        self.program = program

    def command(self, cases, folder):
        flags = folder / "flags"  # a command line may not be as long
        flags.write_text("--gtest_filter=" + ":".join(cases) + "\n--gtest_brief=1\n")
        return [str(self.program), f"--gtest_flagfile={flags}"]

    def cases(self):
        text = subprocess.run([str(self.program), "--gtest_list_tests"], capture_output=True, text=True, check=True).stdout
        found, suite = [], ""
        for line in text.splitlines():
            name = line.split("#")[0].rstrip()
            if name.startswith("  "):
                found.append(suite + name.strip())
            elif name.endswith("."):
                suite = name
        return [case for case in found if "DISABLED_" not in case]


def read_log(path):
    lines = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(line))
        except ValueError:
            pass
    return lines


MOST_MEMORY_BYTES = 8 << 30  # that can be written to: a mutant may ask for memory without end


def limit_memory():
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY_BYTES, MOST_MEMORY_BYTES))


def run_cases(tests, cases, mutant, limit_of):
    """[log line of each case that ended], and how it ended: ("done" | "failed" | "timeout" | "crash", case under way or None)."""
    with tempfile.TemporaryDirectory(prefix="tandem-mutation-") as folder:
        folder = pathlib.Path(folder)
        log = folder / "log"
        environment = dict(os.environ, TANDEM_MUTANT_LOG=str(log), OMP_NUM_THREADS="1", TMPDIR=str(folder))
        environment.pop("TANDEM_MUTANT", None)
        if mutant:
            environment["TANDEM_MUTANT"] = str(mutant)
        process = subprocess.Popen(["nice", "-n", "10", *tests.command(cases, folder)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                   env=environment, cwd=folder, start_new_session=True, preexec_fn=limit_memory)
        seen, since, timed_out = 0, time.monotonic(), False
        while process.poll() is None:
            time.sleep(0.02)
            size = log.stat().st_size if log.exists() else 0
            if size != seen:
                seen, since = size, time.monotonic()
                continue
            lines = read_log(log) if time.monotonic() - since > 5 else []
            under_way = lines[-1].get("begin") if lines else None
            if time.monotonic() - since > limit_of(under_way):
                timed_out = True
                break
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
        lines = read_log(log)
    ended = [line for line in lines if "end" in line]
    under_way = lines[-1].get("begin") if lines else None
    if timed_out:
        return ended, ("timeout", under_way)
    if ended and ended[-1]["status"] not in ("pass", "skip"):
        return ended, ("failed", ended[-1]["end"])
    if process.returncode != 0:
        return ended, ("crash", under_way or (ended[-1]["end"] if ended else None))
    return ended, ("done", None)


def cover_cases(tests, cases):
    """case -> {"seconds", "reached", "status"} without a mutant on."""
    found, left = {}, list(cases)
    while left:
        ended, (_, under_way) = run_cases(tests, left, 0, lambda _: 600)
        for line in ended:
            found[line["end"]] = {"seconds": line["seconds"], "reached": line["reached"], "status": line["status"]}
        left = [case for case in left if case not in found]
        if left:  # one of them broke the program
            broken = under_way if under_way in left else left[0]
            left.remove(broken)
            found[broken] = {"seconds": 0, "reached": [], "status": "broken"}
    return found


def batches(cases, size):
    """Batches in which every suite has its turn."""
    by_suite = {}
    for case in cases:
        by_suite.setdefault(case.split("/")[0], []).append(case)
    dealt = []
    while by_suite:
        for suite in list(by_suite):
            dealt.append(by_suite[suite].pop(0))
            if not by_suite[suite]:
                del by_suite[suite]
    return [dealt[begin : begin + size] for begin in range(0, len(dealt), size)]


def judge(tests, mutant, cases, cover, say):
    """What becomes of a mutant in those of the cases that reach it: {"status": "killed" | "survived" | "not reached", ...}."""
    reaching = [case for case in cases if mutant in cover[case]["reached"] and cover[case]["status"] == "pass"]
    if not reaching:
        return {"status": "not reached", "cases": 0}

    def limit(case):
        return 15 + 20 * (cover[case]["seconds"] if case in cover else 0)

    left = sorted(reaching, key=lambda case: cover[case]["seconds"])
    while left:
        part = left[: tests.part]  # the program has an order of its own
        ended, (how, case) = run_cases(tests, part, mutant, limit)
        if how == "done":
            left = left[tests.part :]
            continue
        check = ended[-1]["check"] if how == "failed" else how
        if case is None:  # it did not get as far as a case
            return {"status": "killed", "case": part[0], "check": check, "cases": len(reaching)}
        # A failure counts if it comes again, and only with the mutant.
        _, (how_again, _) = run_cases(tests, [case], mutant, limit)
        _, (how_without, _) = run_cases(tests, [case], 0, limit)
        if how_again != "done" and how_without == "done":
            return {"status": "killed", "case": case, "check": check, "cases": len(reaching)}
        say(f"  {case}: {check}, not seen again")
        done = {line["end"] for line in ended} | {case}
        left = [other for other in left if other not in done]
    return {"status": "survived", "cases": len(reaching)}
