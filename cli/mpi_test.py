#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Ranks that are processes: `tandem ... --transport mpi` under mpirun, with processes that are killed and stopped.

    mpi_test.py path/to/tandem [mpirun]

Exit status 77 where there is no mpirun, or the program was built without MPI.
"""
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

TANDEM = pathlib.Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else None
MPIRUN = (sys.argv[2] if len(sys.argv) > 2 else None) or shutil.which("mpirun")
SKIPPED = 77

# Containers run as root; three processes on two cores are more than Open MPI would start unasked.
ENVIRONMENT = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
               "OMPI_MCA_rmaps_base_oversubscribe": "1", "OMP_NUM_THREADS": "1"}
# A run that goes on until somebody ends it.
ENDLESS = ["train", "--steps", "1000000", "--set", "data=3", "--transport", "mpi"]


def command(processes, *arguments):
    return [MPIRUN, "-n", str(processes), str(TANDEM), *map(str, arguments)]


def run(processes, *arguments, seconds=60):
    return subprocess.run(command(processes, *arguments), env=ENVIRONMENT, capture_output=True, text=True, timeout=seconds,
                          check=False)


def start(processes, *arguments, output):
    return subprocess.Popen(command(processes, *arguments), env=ENVIRONMENT, stdout=output, stderr=subprocess.STDOUT)


def pids_by_rank(launcher):
    """Process ids of the ranks that this mpirun started."""
    found = {}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if int(re.search(r"^PPid:\s+(\d+)", (folder / "status").read_text(), re.M)[1]) != launcher:
                continue
            variables = (folder / "environ").read_bytes().split(b"\0")
        except (OSError, TypeError):
            continue  # it has ended meanwhile
        for variable in variables:
            if variable.startswith(b"OMPI_COMM_WORLD_RANK="):
                found[int(variable.split(b"=")[1])] = int(folder.name)
    return found


def wait_until(condition, what, seconds=30):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if (value := condition()):
            return value
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds} s: {what}")


class Processes(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="tandem-mpi-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def start_endless(self, *more):
        """An endless run of three processes that has done its first step: launcher, pids by rank, file of its output."""
        text = self.folder / "output.txt"
        with text.open("wb") as output:
            launcher = start(3, *ENDLESS, *more, output=output)
        self.addCleanup(lambda: (launcher.kill(), launcher.wait()))
        wait_until(lambda: "step      1" in text.read_text(), "the first step")
        pids = pids_by_rank(launcher.pid)
        self.assertEqual(sorted(pids), [0, 1, 2])
        return launcher, pids, text

    def test_suite_passes_with_what_fits_the_job(self):
        result = self.folder / "result.json"
        done = run(3, "run", "data_parallel", "--quick", "--transport", "mpi", "--repetitions", "2", "--without-peak", "--out",
                   result)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        written = json.loads(result.read_text())
        self.assertEqual(written["environment"]["transport"], "mpi")
        summary = written["summary"]
        self.assertGreaterEqual(summary["passed"], 10)
        self.assertEqual((summary["failed"], summary["invalid"]), (0, 0))
        for case in written["cases"]:
            if case["plan"]["data"] > 3:
                self.assertEqual(case["status"], "skip")
                self.assertIn("ranks, the job has 3 processes", case["reason"])
            else:
                self.assertEqual(case["status"], "pass", case)
        # By the closed form of all ranks: the evidence of one process alone would have a third of it.
        three = next(case for case in written["cases"] if case["case"] == "data_parallel/ranks3/accum3/fp32")
        sent = next(item for item in three["properties"] if item["name"] == "gradient_bytes_on_the_wire")
        self.assertGreater(sent["value"], 0)
        self.assertEqual(sent["value"], sent["limit"])
        # Only one process prints.
        self.assertEqual(done.stdout.count("data_parallel/ranks3/accum3/fp32"), 1)

    def test_training_is_the_same_bit_for_bit_as_on_threads(self):
        losses = {}
        for transport, processes in (("threads", 1), ("mpi", 3)):
            report = self.folder / f"{transport}.json"
            done = run(processes, "train", "--steps", 4, "--set", "data=3", "--set", "zero=1", "--transport", transport,
                       "--json", report, "--out", self.folder / transport)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            losses[transport] = json.loads(report.read_text())["loss"]
        self.assertEqual(len(losses["mpi"]), 4)
        self.assertEqual(losses["mpi"], losses["threads"])
        saved = [{file.name: file.read_bytes() for file in (self.folder / transport / "step-00000004").iterdir()}
                 for transport in ("threads", "mpi")]
        self.assertEqual(sorted(saved[0]), ["manifest.json"] + [f"shard-0000{rank}.safetensors" for rank in range(3)])
        self.assertEqual(saved[0], saved[1])

    def test_processes_without_a_rank_are_told_of(self):
        done = run(3, "train", "--steps", 1, "--set", "data=2", "--transport", "mpi")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual(done.stderr.count("the job has 3 processes, the plan 2 ranks: 1 of them has nothing to do"), 1, done.stderr)

    def test_checkpoints_outlive_the_job(self):
        out = self.folder / "run"
        launcher, pids, _ = self.start_endless("--out", out, "--set", "checkpoint_every_steps=5", "--set", "checkpoint_keep=2")
        wait_until(lambda: (out / "latest").exists(), "the first checkpoint")
        os.kill(pids[2], signal.SIGKILL)
        self.assertNotEqual(launcher.wait(timeout=20), 0)
        newest = max(int(folder.name[5:]) for folder in out.glob("step-????????"))
        done = subprocess.run([str(TANDEM), "train", "--resume", str(out), "--steps", str(newest + 2)], capture_output=True,
                              text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn(f"step-{newest + 2:08}", done.stdout)

    def test_killed_rank_ends_all_with_its_name(self):
        for victim in (1, 0):
            with self.subTest(victim=victim):
                launcher, pids, text = self.start_endless()
                os.kill(pids[victim], signal.SIGKILL)
                killed_at = time.monotonic()
                self.assertNotEqual(launcher.wait(timeout=20), 0)
                self.assertLess(time.monotonic() - killed_at, 5)
                lines = re.findall(r"^tandem: .*$", text.read_text(), re.M)
                named = [line for line in lines if f"rank {victim} (pid {pids[victim]} on host " in line and "died" in line]
                self.assertEqual(len(named), 2, lines)

    def test_stopped_rank_is_named_by_those_that_wait_for_it(self):
        launcher, pids, text = self.start_endless("--deadline", "2")
        os.kill(pids[1], signal.SIGSTOP)
        self.addCleanup(lambda: os.kill(pids[1], signal.SIGKILL) if pathlib.Path(f"/proc/{pids[1]}").exists() else None)
        self.assertNotEqual(launcher.wait(timeout=20), 0)
        lines = re.findall(r"^tandem: .*$", text.read_text(), re.M)
        self.assertTrue(any("waited 2000 ms in" in line and "rank 1" in line for line in lines), lines)
        self.assertTrue(any(f"rank 1 (pid {pids[1]} on host " in line and "does not answer" in line for line in lines), lines)

    def test_bad_input_is_one_line_of_one_process(self):
        for arguments, words in (
            (["run", "data_parallel", "--transport", "mpi", "--link", "laptop"], "only the messages of threads are shaped"),
            (["train", "--set", "data=4", "--transport", "mpi"], "the plan has 4 ranks, but the job has 2 processes"),
            (["run", "data_parallel", "--transport", "mpi", "--out", self.folder / "none" / "r.json"], "--out"),
            (["run", "data_parallel", "--transport", "nccl"], "--transport nccl"),
            *([] if os.path.exists("/dev/nvidiactl") else [(["train", "--transport", "nccl", "--backend", "cuda"], "--transport nccl")]),
        ):
            with self.subTest(arguments=arguments):
                done = run(2, *arguments)
                self.assertEqual(done.returncode, 2)
                lines = [line for line in done.stderr.splitlines() if line.startswith("tandem: ")]
                self.assertEqual(len(lines), 1, done.stderr)
                self.assertIn(words, lines[0])


if __name__ == "__main__":
    if MPIRUN is None:
        print("skipped: there is no mpirun here")
        sys.exit(SKIPPED)
    listed = subprocess.run([str(TANDEM), "list", "--json", "-"], capture_output=True, text=True, check=True)
    if "mpi" not in json.loads(listed.stdout)["transports"]:
        print("skipped: this build has no MPI")
        sys.exit(SKIPPED)
    unittest.main(argv=sys.argv[:1], verbosity=2)
