#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run that is killed at each of its file calls, or whose disk is full, or fails to flush.

    kill_test.py path/to/tandem path/to/kill_shim.so [--all]

A run of two ranks saves after each step and keeps one checkpoint. It is started again and again, each time with kill_shim.c,
which ends it at the first, the second, ... of the calls that change something in its folder, until there is no such call any
more. What is on the disk then must hold the newest checkpoint that had got its name, or a newer one, with the bytes of an
undisturbed run, and the run must go on from it with the losses of the undisturbed one, bit for bit. --all: goes on from each of
them, with both ways of writing and both optimizers, instead of a sample.
"""
import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

ALL = "--all" in sys.argv[1:]
TANDEM, SHIM = (pathlib.Path(argument).resolve() for argument in [a for a in sys.argv[1:] if a != "--all"][:2])
WORKERS = max(2, os.cpu_count() or 1)
STEPS, STEPS_AT_LAST = 2, 5
# Flushing costs nothing in memory, and a killed process leaves the same there.
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
RUN = ["train"]
for setting in ("layers=1", "hidden=8", "heads=2", "vocabulary=16", "sequence=8", "rows=4", "data=2", "evaluate_batches=1",
                "checkpoint_every_steps=1", "loader_threads=1"):
    RUN += ["--set", setting]


class Wrong(Exception):
    """What is on the disk is not what it must be."""


def tandem(*arguments, **variables):
    return subprocess.run([str(TANDEM), *map(str, arguments)], env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
                          capture_output=True, text=True, timeout=120, check=False)


def state_of(step_folder):
    """The bytes of a step but for its manifest, which names the run's own settings."""
    return {file.name: file.read_bytes() for file in step_folder.iterdir() if file.suffix == ".safetensors"}


class Outcome:
    """A run under the shim, and what it left."""

    def __init__(self, done, folder):
        self.status = done.returncode
        self.stderr = done.stderr
        self.folder = folder
        self.named = [int(step) for step in re.findall(r"kill_shim: named step-(\d+)", done.stderr)]
        self.harm = re.search(r"kill_shim: call .*", done.stderr)

    def lines(self):
        return [line for line in self.stderr.splitlines() if line.startswith("tandem: ")]


class Kill(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.root = pathlib.Path(tempfile.mkdtemp(prefix="tandem-kill-", dir=MEMORY))
        cls.addClassCleanup(shutil.rmtree, cls.root)
        cls.references = {}

    def reference(self, optimizer):
        """Losses, and state after each step, of a run that nobody disturbs."""
        if optimizer not in self.references:
            folder, report = self.root / f"reference-{optimizer}", self.root / f"reference-{optimizer}.json"
            done = tandem(*RUN, "--set", f"optimizer={optimizer}", "--steps", STEPS_AT_LAST, "--out", folder, "--json", report)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(tandem("checkpoint", "verify", folder).returncode, 0)
            states = {step: state_of(folder / f"step-{step:08}") for step in range(1, STEPS_AT_LAST + 1)}
            self.references[optimizer] = json.loads(report.read_text())["loss"], states
        return self.references[optimizer]

    def disturbed(self, mode, at, asynchronous, optimizer="adamw", store=False):
        parent = self.root / f"{mode}-{at}-{asynchronous}-{optimizer}"
        (parent / "run").mkdir(parents=True)
        second = ["--store", parent / "store"] if store else []
        done = tandem(*RUN, *second, "--set", f"optimizer={optimizer}", "--set", f"checkpoint_async={asynchronous}",
                      "--set", "checkpoint_keep=1", "--steps", STEPS, "--out", parent / "run",
                      "--json", self.root / f"{parent.name}.json",
                      LD_PRELOAD=str(SHIM), KILL_SHIM_FOLDER=f"{parent}/", KILL_SHIM_AT=str(at), KILL_SHIM_MODE=mode)
        return Outcome(done, parent / "run")

    def check(self, outcome, optimizer="adamw"):
        """Raises Wrong; returns the step of the newest whole checkpoint, or None where none need be there."""
        steps = []
        if outcome.folder.is_dir():
            listed = tandem("checkpoint", "verify", outcome.folder, "--json", "-")
            if listed.returncode in (0, 1):
                steps = [item["step"] for item in json.loads(listed.stdout)["checkpoints"] if item["state"] == "whole"]
            elif "no checkpoint to verify" not in listed.stderr:
                raise Wrong(f"verify: {listed.stderr}")
        if outcome.named and (not steps or max(steps) < max(outcome.named)):
            raise Wrong(f"step {max(outcome.named)} was there, now {steps} are whole")
        for step in steps:
            if state_of(outcome.folder / f"step-{step:08}") != self.reference(optimizer)[1][step]:
                raise Wrong(f"step {step} has other bytes than in the undisturbed run")
        return max(steps, default=None)

    def check_resumed(self, outcome, step, optimizer="adamw"):
        report = self.root / f"resumed-{outcome.folder.parent.name}.json"
        done = tandem("train", "--resume", outcome.folder, "--steps", STEPS_AT_LAST, "--json", report)
        if step is None:
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
            return
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(json.loads(report.read_text())["loss"], self.reference(optimizer)[0][step:])
        left = sorted(path.name for path in outcome.folder.iterdir() if path.name != "timings.jsonl")
        self.assertEqual(left, ["latest", f"step-{STEPS_AT_LAST:08}"])
        self.assertEqual(state_of(outcome.folder / left[1]), self.reference(optimizer)[1][STEPS_AT_LAST])

    def one_kill(self, at, asynchronous, optimizer, resume, store):
        """True where the run ended by itself."""
        outcome = self.disturbed("kill", at, asynchronous, optimizer, store)
        if outcome.status == 0:
            self.assertEqual((outcome.harm, outcome.named), (None, [1, 2]), outcome.stderr)
        else:
            self.assertEqual(outcome.status, -9, outcome.stderr)
        step = self.check(outcome, optimizer)
        if store:
            listed = tandem("checkpoint", "verify", f"file://{outcome.folder.parent / 'store'}")
            if listed.returncode != 0:
                self.assertIn("no checkpoint to verify", listed.stderr, listed.stdout)
        if resume:
            self.check_resumed(outcome, step, optimizer)
        shutil.rmtree(outcome.folder.parent)
        return outcome.status == 0

    def kill_at(self, asynchronous, optimizer, stride, resume_each, store=False):
        """At every stride-th call until the run ends by itself; the number of the last one."""
        self.reference(optimizer)
        with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
            for first in range(0, 10000, 2 * WORKERS):
                numbers = range(first, first + 2 * WORKERS)
                kill = lambda number: self.one_kill(1 + number * stride, asynchronous, optimizer,  # noqa: E731
                                                    number % resume_each == 0, store)
                if any(list(pool.map(kill, numbers))):
                    return first * stride
        raise AssertionError("the run does not end")

    def test_killed_at_every_call_while_writing_in_the_background(self):
        self.assertGreater(self.kill_at("true", "adamw", 1, 1 if ALL else 6), 35)

    def test_killed_at_calls_of_a_run_that_waits(self):
        for optimizer in ("adamw", "sgd") if ALL else ("adamw",):
            self.assertGreater(self.kill_at("false", optimizer, 1 if ALL else 2, 1 if ALL else 4), 35)

    def test_killed_while_copying_to_a_second_place(self):
        self.assertGreater(self.kill_at("true", "sgd", 1 if ALL else 6, 1 if ALL else 4, store=True), 50)

    def test_training_goes_on_where_the_disk_is_full(self):
        for at in range(1, 50, 1 if ALL else 7):
            with self.subTest(at=at):
                outcome = self.disturbed("full", at, "true" if at % 2 else "false")
                self.assert_survived(outcome)

    def test_training_goes_on_where_a_flush_fails(self):
        for at in range(1, 12, 1 if ALL else 3):
            with self.subTest(at=at):
                self.assert_survived(self.disturbed("sync", at, "true"))

    def assert_survived(self, outcome):
        report = json.loads((self.root / f"{outcome.folder.parent.name}.json").read_text())
        self.assertEqual(report["loss"], self.reference("adamw")[0][:STEPS])
        step = self.check(outcome)
        if outcome.lines():
            self.assertIsNotNone(outcome.harm)
            self.assertRegex(outcome.lines()[0], "No space left on device|Input/output error")
        # The last checkpoint is safe, or the status says that it is not.
        self.assertEqual(outcome.status, 0 if step == STEPS else 4, outcome.stderr)

    def test_writes_that_do_half_of_what_they_were_asked_for_are_taken_up_again(self):
        outcome = self.disturbed("short", 0, "true")
        self.assertEqual((outcome.status, self.check(outcome)), (0, STEPS), outcome.stderr)

    def test_this_test_notices_a_changed_bit(self):
        for at in (6, 8):
            with self.assertRaises(Wrong):
                self.check(self.disturbed("flip", at, "false"))

    def test_this_test_notices_that_the_old_one_goes_before_the_new_one_is_there(self):
        def noticed(at):
            try:
                self.check(self.disturbed("eager", at, "false"))
            except Wrong:
                return True
            return False
        # The first of them ends before the second checkpoint is begun, the last after it has got its name.
        with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
            found = list(pool.map(noticed, (10, 24, 30, 10000)))
        self.assertEqual((found[0], found[-1], any(found)), (False, False, True))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
