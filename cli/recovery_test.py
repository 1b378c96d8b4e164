#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs that are disturbed on purpose: `tandem train --supervise --fault ...` as its user meets it.

    recovery_test.py path/to/tandem [mpirun]

Whatever happens on the way, the last checkpoint must have the bytes of the run that nothing disturbed, and no process may be left
behind. Without mpirun the tests of ranks that are processes are skipped.
"""
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

TANDEM = pathlib.Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else None
MPIRUN = (sys.argv[2] if len(sys.argv) > 2 else None) or shutil.which("mpirun")
ENVIRONMENT = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}
if MPIRUN:
    ENVIRONMENT["PATH"] = f"{pathlib.Path(MPIRUN).resolve().parent}{os.pathsep}{ENVIRONMENT['PATH']}"

STEPS = 20
BEAT = 0.2
# What a busy machine may add to the time that the detector allows; a rank that waits for one that is gone would take a minute.
LATE_SECONDS = 5
# Steps long enough for a beat to see one, on a machine that has nothing else to do.
SETTINGS = ["layers=2", "hidden=128", "heads=4", "vocabulary=64", "sequence=256", "rows=12", "micro_batches=2", "residual_dropout=0.1",
            "checkpoint_every_steps=5", "evaluate_every_steps=0", "evaluate_batches=1"]
SUPERVISION = ["--supervise", "--heartbeat-seconds", str(BEAT), "--backoff-seconds", "0.05"]


def command(out, *more, data=2):
    line = [str(TANDEM), "train", "--steps", str(STEPS), "--out", str(out), "--set", f"data={data}"]
    for setting in SETTINGS:
        line += ["--set", setting]
    return line + [str(word) for word in more]


def faults(*texts):
    return [word for text in texts for word in ("--fault", text)]


def run(line, seconds=60):
    return subprocess.run(line, env=ENVIRONMENT, capture_output=True, text=True, timeout=seconds, check=False)


def last_hashes(out):
    manifest = json.loads((out / f"step-{STEPS:08}" / "manifest.json").read_text())
    return {entry["name"]: entry["xxh128"] for entry in manifest["files"]}


def processes_of(out):
    """Processes that have to do with the run in this folder."""
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # it has ended meanwhile
        if str(out) in words and int(folder.name) != os.getpid():
            found.append(" ".join(words))
    return found


def text_of(file):
    return file.read_text() if file.exists() else ""


def wait_until(condition, what, seconds=30):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if (value := condition()):
            return value
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds} s: {what}")


class Runs(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(prefix="tandem-recovery-")
        cls.addClassCleanup(folder.cleanup)
        cls.root = pathlib.Path(folder.name)
        done = run(command(cls.root / "undisturbed"))
        assert done.returncode == 0, done.stdout + done.stderr
        cls.expected = last_hashes(cls.root / "undisturbed")

    def setUp(self):
        self.out = self.root / self._testMethodName

    def check(self, done, status):
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        self.assertEqual(processes_of(self.out), [])

    def supervise(self, *more, status=0):
        done = run(command(self.out, *SUPERVISION, *more))
        self.check(done, status)
        return done

    def assert_undisturbed(self):
        self.assertEqual(last_hashes(self.out), self.expected)

    def incidents(self, kind=None):
        lines = [json.loads(line) for line in (self.out / "incidents.jsonl").read_text().splitlines()]
        return lines if kind is None else [line for line in lines if line["kind"] == kind]

    def first_incident(self, kind):
        found = self.incidents(kind)
        self.assertTrue(found, self.incidents())
        return found[0]

    def lost_rank(self):
        """The incident of a rank that is a process and was killed: whichever is seen first, its silence or the end of mpirun."""
        found = [line for line in self.incidents() if line["kind"] in ("dead", "exit")]
        self.assertEqual(len(found), 1, self.incidents())
        return found[0]

    def assert_found_in_time(self, incident):
        """Three beats and a half; a hang may take longer where the run has shown that its steps do."""
        limit = re.search(r"\(limit ([\d.]+) s\)", incident["what"])
        allowed = float(limit[1]) if limit else 3.5 * BEAT
        self.assertLess(incident["detected_after_seconds"], allowed + LATE_SECONDS, incident)

    def losses(self):
        """By step, the last time that it was done."""
        lines = map(json.loads, (self.out / "metrics.jsonl").read_text().splitlines())
        return {line["step"]: line["loss"] for line in lines if line["kind"] == "step"}


class Threads(Runs):
    """All ranks in one process."""

    def test_killed_and_hung_workers_are_started_again(self):
        report = self.root / "report.json"
        done = self.supervise(*faults("kill@step=8", "hang@step=16,rank=1"), "--json", report)
        self.assert_undisturbed()
        self.assertIn("3 attempts, 2 failures", done.stdout)
        exits, hangs = self.incidents("exit"), self.incidents("hung")
        self.assertEqual((len(exits), len(hangs)), (1, 1), self.incidents())
        self.assertIn("signal 9", exits[0]["what"])
        self.assert_found_in_time(exits[0])
        self.assert_found_in_time(hangs[0])
        self.assertEqual((hangs[0]["rank"], hangs[0]["phase"], hangs[0]["action"]), (1, "train", "restart from step 10"), hangs)
        resumed = self.incidents("resumed")
        self.assertEqual(len(resumed), 2)
        self.assertTrue(all(line["seconds_to_first_new_step"] > 0 for line in resumed), resumed)
        written = json.loads(report.read_text())
        self.assertEqual((written["end"], written["attempts"], written["failures"]), ("finished", 3, 2))
        self.assertEqual([line["kind"] for line in written["incidents"]], [line["kind"] for line in self.incidents()])
        self.assertTrue(0 < written["goodput"] < 1, written)
        self.assertTrue(0 < written["daly"]["goodput"] <= 1, written)
        self.assertEqual(sorted(self.losses()), list(range(1, STEPS + 1)))
        # The run is over: the same command has nothing left to do, and strikes nobody.
        again = self.supervise(*faults("kill@step=8", "hang@step=16,rank=1"))
        self.assertIn("goes on from step 20", again.stderr)
        self.assertIn("nothing to do", again.stdout)

    def test_faults_while_saving_and_restoring(self):
        done = self.supervise(*faults("kill@step=8,during=save", "kill@step=5,rank=1,during=restore", "disk_full@step=14,count=2"))
        self.assert_undisturbed()
        self.assertIn("3 attempts, 2 failures", done.stdout)

    def test_a_damaged_checkpoint_is_passed_over(self):
        # At once, so that the one that is damaged is the newest.
        done = self.supervise(*faults("corrupt@step=13", "kill@step=14"), "--set", "checkpoint_async=false")
        self.assert_undisturbed()
        self.assertIn("step-00000010", done.stderr)
        self.assertEqual(self.first_incident("exit")["action"], "restart from step 5")

    def test_the_same_command_goes_on_after_its_supervisor_was_killed(self):
        line = command(self.out, *SUPERVISION, *faults("supervisor@step=8"))
        done = run(line)
        self.assertEqual(done.returncode, -signal.SIGKILL, done.stderr)
        self.check(run(line), 0)
        self.assert_undisturbed()

    def test_a_hung_worker_of_a_supervisor_that_was_killed_ends_by_itself(self):
        line = command(self.out, *SUPERVISION, "--folder-seconds", "0.2", *faults("hang@step=6,rank=1"))
        process = subprocess.Popen(line, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(lambda: "hang" in text_of(self.out / "faults_struck"), "the fault")
        process.kill()
        process.wait()
        wait_until(lambda: not processes_of(self.out), "the end of the worker", seconds=10)

    def test_preempted_runs_save_and_go_on(self):
        line = faults("preempt@step=7")
        done = self.supervise(*line, status=130)
        self.assertIn("the same command goes on", done.stderr)
        self.assertIn("goes on from step 7", self.supervise(*line).stderr)
        self.assert_undisturbed()
        self.assertEqual(len(self.incidents("preempted")), 1)

    def test_the_supervisor_passes_a_signal_on(self):
        for number in (signal.SIGTERM, signal.SIGUSR1):
            with self.subTest(signal=number):
                self.out = self.root / f"signal-{number}"
                line = command(self.out, *SUPERVISION)
                line[line.index("--steps") + 1] = "1000000"
                process = subprocess.Popen(line, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                wait_until(lambda: (self.out / "latest").exists(), "the first checkpoint")
                process.send_signal(number)
                output, errors = process.communicate(timeout=30)
                self.assertEqual(process.returncode, 130, output + errors)
                self.assertEqual(processes_of(self.out), [])
                said = re.search(r"^tandem: interrupted after step (\d+);", errors, re.M)
                self.assertIsNotNone(said, errors)
                self.assertTrue((self.out / f"step-{int(said[1]):08}").is_dir())

    def test_a_run_that_never_gets_on_is_given_up(self):
        done = self.supervise(*faults("kill@step=2", "kill@step=2", "kill@step=2"), "--max-restarts", 2, status=4)
        self.assertEqual(len([line for line in done.stderr.splitlines() if "signal 9" in line]), 3, done.stderr)  # each failure once
        self.assertEqual(len([line for line in done.stderr.splitlines() if line.startswith("tandem: given up")]), 1, done.stderr)
        self.assertEqual(len(self.incidents("exit")), 3)
        self.assertEqual(self.incidents()[-1]["kind"], "gave_up")

    def test_what_memory_has_is_not_read_from_disk(self):
        memory = self.root / "memory"
        done = self.supervise("--memory-tier", memory, "--set", "checkpoint_every_steps=0", *faults("kill@step=14"))
        self.assert_undisturbed()
        self.assertEqual(self.first_incident("exit")["action"], "restart from step 13", done.stderr)
        self.assertEqual(self.first_incident("resumed")["lost_steps"], 0)

    def test_a_copy_in_memory_that_nobody_has_looked_at_is_not_gone_back_to(self):
        """One replica's weights are wrong, and before the next look a rank is killed: from a copy of then, both would be."""
        done = self.supervise("--memory-tier", self.root / "memory-looked-at", *faults("flip@step=10,rank=1,target=weights", "kill@step=11"),
                              "--set", "checkpoint_every_steps=0", "--set", "anomaly_action=rollback")
        self.assert_undisturbed()
        self.assertEqual(self.first_incident("exit")["action"], "restart from step 9", done.stderr)

    def test_a_rollback_is_told_and_can_be_computed_again(self):
        """Weights that are not finite cannot be repaired by computing the step again."""
        self.supervise(*faults("nan@step=14,rank=1,target=weights"), "--set", "anomaly_action=rollback", "--set",
                       "anomaly_confirm_steps=2", "--set", "anomaly_window=8")
        self.assert_undisturbed()
        incident = self.first_incident("anomaly")
        self.assertEqual((incident["rank"], incident["action"]), (1, "roll back to step 10"), incident)
        done = run([str(TANDEM), "train", "--replay", str(self.out / "incident-001")])
        self.check(done, 0)
        self.assertIn("3 of 3 as recorded", done.stdout)
        self.assertIn("it was the machine", done.stdout)

    def test_a_run_without_a_way_back_ends_with_its_reason(self):
        done = self.supervise(*faults("nan@step=8,target=weights"), "--set", "anomaly_action=rollback", "--set",
                              "anomaly_max_rollbacks=0", status=4)
        self.assertEqual(len(re.findall("^tandem: given up: step 8 ", done.stderr, re.M)), 1, done.stderr)
        self.assertEqual(self.incidents()[-1]["kind"], "gave_up")

    def test_a_run_that_is_interrupted_amid_its_products_is_saved(self):
        for attempt in range(4):
            self.out = self.root / f"interrupted-{attempt}"
            line = command(self.out, data=1)
            line[line.index("--steps") + 1] = "1000000"
            process = subprocess.Popen(line, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            wait_until(lambda: (self.out / "latest").exists(), "the first checkpoint")
            process.send_signal(signal.SIGTERM)
            output, errors = process.communicate(timeout=30)
            self.assertEqual(process.returncode, 130, output + errors)

    def test_a_reader_that_has_seen_enough_ends_no_run(self):
        process = subprocess.Popen(command(self.out, *SUPERVISION), env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   text=True)
        process.stdout.readline()
        process.stdout.close()
        self.assertEqual(process.wait(timeout=60), 0, process.stderr.read())
        process.stderr.close()
        self.assert_undisturbed()

    def test_workers_that_do_nothing_are_no_success(self):
        done = self.supervise("--launcher", "true", status=4)
        self.assertIn("the newest checkpoint is of step 0 of 20", done.stderr)

    def test_a_full_disk_is_told_once_and_what_to_do(self):
        for step, advice in ((11, "step 10 is saved: mend this, and go on from it with --resume "),
                             (1, "no step is saved: mend this, and start again")):
            with self.subTest(step=step):
                out = self.root / f"full-{step}"
                done = run(command(out, *faults(f"disk_full@step={step},count=20"), "--set", "checkpoint_async=false"))
                self.check(done, 4)
                last = done.stderr.splitlines()[-1]
                self.assertTrue(last.startswith("tandem: the last checkpoint is not safe: the checkpoint of step 20 "), done.stderr)
                self.assertIn("No space left on device", last)
                self.assertIn(advice, last)
                self.assertEqual(done.stderr.count("the checkpoint of step 20 "), 1, done.stderr)
                self.assertEqual(len(done.stderr.splitlines()), 2 if step == 11 else 4, done.stderr)

    def test_a_supervisor_does_not_say_again_what_its_workers_have_said(self):
        patient = ["--supervise", "--heartbeat-seconds", "2", "--backoff-seconds", "0.05"]  # no slow disk is a hang
        done = run(command(self.out, *patient, *faults("disk_full@step=11,count=20"), "--set", "checkpoint_async=false"))
        self.check(done, 0)
        self.assert_undisturbed()
        for step in (15, 20):
            self.assertEqual(done.stderr.count(f"the checkpoint of step {step} could not be written"), 1, done.stderr)
        self.assertIn("supervisor: the workers have ended with the reason above; restart from step 10", done.stderr)
        self.assertIn("No space left on device", self.first_incident("exit")["what"])
        self.out = self.root / "preempted-once"
        done = self.supervise(*faults("preempt@step=7"), status=130)
        self.assertEqual(len(re.findall("interrupted after step 7", done.stderr)), 1, done.stderr)

    def test_a_step_that_was_left_out_does_not_break_a_run(self):
        report = self.root / "skipped.json"
        done = run(command(self.out, *faults("nan@step=8,rank=1"), "--set", "anomaly_action=skip", "--set", "anomaly_retry=false",
                           "--json", report))
        self.check(done, 0)
        self.assertIn("1 skipped", done.stdout)
        incidents = json.loads(report.read_text())["incidents"]
        self.assertEqual([(one["step"], one["rank"]) for one in incidents], [(8, 1)], incidents)
        self.assertIn("left out", incidents[0]["what"])

    def test_one_supervisor_at_a_time(self):
        self.out.mkdir()
        import fcntl  # as the program does
        with (self.out / "run.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            done = self.supervise("--folder-seconds", 0.1, status=2)
        self.assertIn("another supervisor runs there", done.stderr.splitlines()[-1])

    def test_a_preempted_job_goes_back_into_its_queue(self):
        tools, asked = self.root / "tools", self.root / "asked"
        tools.mkdir()
        (tools / "scontrol").write_text(f"#!/bin/sh\necho \"$@\" > {asked}\n")
        (tools / "scontrol").chmod(0o755)
        slurm = {**ENVIRONMENT, "PATH": f"{tools}{os.pathsep}{ENVIRONMENT['PATH']}", "SLURM_JOB_ID": "77"}
        done = subprocess.run(command(self.out, *SUPERVISION, "--requeue", *faults("preempt@step=3")), env=slurm, capture_output=True,
                              text=True, timeout=60, check=False)
        self.check(done, 130)
        self.assertEqual(asked.read_text(), "requeue 77\n")

    def test_the_example_of_the_help_runs_as_it_stands(self):
        text = run([str(TANDEM), "train", "--help"]).stdout
        example = next(line for line in text.splitlines() if "--supervise --out" in line)
        done = subprocess.run(shlex.split(example), cwd=self.root, env={**ENVIRONMENT, "PATH": f"{TANDEM.parent}{os.pathsep}"
                              f"{ENVIRONMENT['PATH']}"}, capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("2 attempts, 1 failure", done.stdout)

    def test_bad_input_is_one_line(self):
        for more, words in (
            (["--fault", "kil@step=3"], "did you mean 'kill'"),
            (["--fault", "kill@step=21"], "the run has only 20 steps"),
            (["--fault", "kill@step=3,rank=2"], "the plan has 2 ranks"),
            (["--fault", "supervisor@step=3"], "add --supervise"),
            (["--fault", "heartbeat@step=3"], "add --supervise"),
            (["--elastic"], "--elastic needs --supervise: "),
            (["--max-restarts", "2"], "--max-restarts needs --supervise: "),
            (["--launcher", "srun -n 2"], "--launcher needs --supervise: "),
            (["--heartbeat-seconds", "2"], "--heartbeat-seconds needs --supervise: "),
            (["--supervise", "--min-ranks", "2"], "--min-ranks needs --elastic: "),
            (["--replay", "nowhere", "--json", "report"], "leave --steps out"),
            (["--supervise", "--set", "hidden=63"], "heads"),
            (["--supervise", "--data", "nowhere.txt"], "nowhere.txt"),
            (["--supervise", "--json", "nowhere/r.json"], "--json"),
            (["--supervise", "--launcher", "nowhere/srun -n 2"], "nowhere/srun"),
            (["--heartbeat-seconds", "0"], "--heartbeat-seconds"),
            (["--tensorboard", "/proc/nowhere"], "--tensorboard /proc/nowhere"),
            (["--supervise", "--metrics", "/proc/nowhere/m.jsonl"], "--metrics /proc/nowhere"),
            (["--supervise", "--elastic", "--min-ranks", "3"], "--min-ranks 3: the plan has 2 ranks"),
            (["--memory-tier", "--ranks-per-node", "3"], "--ranks-per-node 3: the plan has 2 ranks"),
            (["--ranks-per-node", "2"], "add --memory-tier"),
        ):
            with self.subTest(more=more):
                done = run(command(self.out, *more))
                self.check(done, 2)
                self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
                self.assertIn(words, done.stderr)
        for more, words in ((["--supervise"], "give --out"), (["--requeue"], "--requeue needs --out: "),
                            (["--replay", "nowhere"], "nowhere/bundle.json: there is no such file; name a folder")):
            done = run([str(TANDEM), "train", *more])
            self.assertEqual((done.returncode, len(done.stderr.splitlines())), (2, 1), done.stderr)
            self.assertIn(words, done.stderr)

    def test_a_fault_that_nobody_mends_is_told_before_it_strikes(self):
        done = run(command(self.out, *faults("kill@step=2")))
        self.check(done, -signal.SIGKILL)
        self.assertEqual(done.stderr.splitlines(), ["tandem: fault 'kill@step=2': kills this process now (signal 9); with --supervise the run "
                                                    "would be started again"])
        process = subprocess.Popen(command(self.root / "hangs", *faults("hang@step=2,rank=1")), env=ENVIRONMENT,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.addCleanup(process.stderr.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        self.assertIn("fault 'hang@step=2,rank=1': rank 1 stands still from here on", process.stderr.readline())


@unittest.skipIf(MPIRUN is None, "there is no mpirun here")
class Processes(Runs):
    """Ranks that are processes, under mpirun."""

    def test_faults_of_single_ranks_leave_no_trace(self):
        """NaN on one rank is gone when the step is computed again: nothing is skipped."""
        self.supervise(*faults("kill@step=7,rank=1", "hang@step=16", "nan@step=19,rank=1"), "--transport", "mpi", "--memory-tier",
                       self.root / "memory-mpi")
        self.assert_undisturbed()
        lines = [line for line in self.incidents() if line["kind"] != "resumed"]
        kinds = [line["kind"] for line in lines]
        killed = self.lost_rank()
        self.assertEqual(kinds, [killed["kind"], "hung", "anomaly", "finished"], lines)
        hung, anomaly = lines[1:3]
        self.assertIn("rank 1", killed["what"])
        if killed["kind"] == "dead" and "rank" in killed:
            self.assertEqual(killed["rank"], 1, killed)
            self.assertIn(killed["phase"], ("data", "train", "checkpoint"), killed)  # of its last beat
        self.assertEqual((hung["rank"], hung["phase"], hung["step"]), (0, "train", 15), hung)
        self.assert_found_in_time(killed)
        self.assert_found_in_time(hung)
        self.assertEqual((anomaly["rank"], anomaly["action"]), (1, "retry"), anomaly)

    def test_a_lost_rank_is_done_without(self):
        report = self.root / "whole.json"
        self.out = self.root / "three"
        done = run(command(self.out, "--json", report, data=3))
        self.check(done, 0)
        self.out = self.root / "two-of-three"
        done = run(command(self.out, *SUPERVISION, "--elastic", "--transport", "mpi", *faults("lose@step=8,rank=2"), "--set",
                           "checkpoint_async=false", data=3))  # on any disk, step 5 is saved when step 8 begins
        self.check(done, 0)
        lost = self.lost_rank()
        self.assertEqual(lost["action"], "shrink to 2 ranks, restart from step 5", lost)
        manifest = json.loads((self.out / f"step-{STEPS:08}" / "manifest.json").read_text())
        self.assertEqual(len(manifest["files"]), 2)
        losses = self.losses()
        for step, loss in enumerate(json.loads(report.read_text())["loss"], start=1):
            self.assertAlmostEqual(losses[step], loss, delta=2e-5)  # sums of gradients in another order


if __name__ == "__main__":
    if MPIRUN is not None:
        listed = subprocess.run([str(TANDEM), "list", "--json", "-"], capture_output=True, text=True, check=True)
        if "mpi" not in json.loads(listed.stdout)["transports"]:
            MPIRUN = None
    unittest.main(argv=sys.argv[:1], verbosity=2)
