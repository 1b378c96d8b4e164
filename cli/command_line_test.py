#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The program as its user meets it: exit statuses, one clear line for what is wrong, clean stops. Run by CTest with the program."""
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import xml.etree.ElementTree

TANDEM = os.path.abspath(sys.argv.pop(1))
SOURCE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SMALL = ["--set", "hidden=16", "--set", "layers=1", "--set", "heads=2", "--set", "sequence=16"]


def has_gpu():
    return os.path.exists("/dev/nvidiactl")


class CommandLine(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def path(self, name, content=None):
        path = os.path.join(self.folder.name, name)
        if content is not None:
            with open(path, "wb") as file:
                file.write(content)
        return path

    def run_tandem(self, *arguments, environment=None):
        """`environment` in addition to this program's own."""
        return subprocess.run([TANDEM, *arguments], capture_output=True, text=True, errors="replace", timeout=120, cwd=self.folder.name,
                              env={**os.environ, **(environment or {})})

    def refused(self, *arguments, says, environment=None):
        """Exit status 2, and one line on standard error that says each of `says`."""
        done = self.run_tandem(*arguments, environment=environment)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
        self.assertTrue(done.stderr.startswith("tandem: "), done.stderr)
        for text in [says] if isinstance(says, str) else says:
            self.assertIn(text, done.stderr)

    def test_version_is_that_of_result_files(self):
        first = self.run_tandem("--version").stdout.splitlines()[0]
        out = self.path("r.json")
        self.run_tandem("run", "--without-peak", "data_parallel/ranks1/accum1/fp32", "--out", out)
        with open(out, encoding="utf-8") as file:
            environment = json.load(file)["environment"]
        self.assertRegex(first, rf"^tandem {environment['version']} \(.*{environment['compiler']}, {environment['build_type']}\)$")
        self.assertIn("fmt", environment["libraries"])

    # ---- what ranks are made of

    def test_unknown_transport(self):
        self.refused("run", "harness", "--transport", "treads", says=["--transport treads", "did you mean 'threads'?"])

    def test_ranks_of_nccl_compute_on_gpus(self):
        listed = "nccl" in json.loads(self.run_tandem("list", "--json", "-").stdout)["transports"]
        for backend in ("cpu", "simt"):
            self.refused("run", "harness", "--transport", "nccl", "--backend", backend,
                         says=["--transport nccl", f"--backend {backend}" if listed else "this build has no NCCL"])

    @unittest.skipIf(has_gpu(), "there is a GPU")
    def test_nccl_without_a_gpu(self):
        for command in (["run", "data_parallel/ranks2"], ["train", "--steps", "1"], ["pitfalls"], ["probe", "--out", self.path("c")]):
            self.refused(*command, "--transport", "nccl", "--backend", "cuda", says=["--transport nccl", "no "])

    @unittest.skipIf(has_gpu(), "there is a GPU")
    def test_processes_of_nccl_without_a_gpu_wait_for_nobody(self):
        began = time.monotonic()
        for rank in ("0", "1"):
            job = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}
            self.refused("run", "data_parallel/ranks2", "--transport", "nccl", "--backend", "cuda", says="--transport nccl", environment=job)
        self.assertLess(time.monotonic() - began, 30)

    @unittest.skipIf(has_gpu(), "there is a GPU")
    def test_backend_without_a_gpu(self):
        for command in (["run", "data_parallel"], ["train", "--steps", "1"], ["golden", f"{SOURCE}/results/golden/tiny"],
                        ["generate", "--checkpoint", self.folder.name, "--prompt", "a"], ["pitfalls"], ["probe", "--out", self.path("c.json")]):
            self.refused(*command, "--backend", "cuda", says=["--backend cuda: ", "no ", "--backend simt"])

    def test_unknown_backend(self):
        for command in (["run", "data_parallel"], ["train", "--steps", "1"], ["golden", f"{SOURCE}/results/golden/tiny"]):
            self.refused(*command, "--backend", "nonsense", says=["--backend nonsense", "cuda and simt", "cpu"])

    def test_an_emulated_gpu_passes(self):
        out = self.path("r.json")
        done = self.run_tandem("run", "data_parallel/text/ranks2", "--backend", "simt", "--repetitions", "1", "--out", out)
        if done.returncode == 2 and "this build has no emulated GPU" in done.stderr:
            self.skipTest(done.stderr)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        with open(out, encoding="utf-8") as file:
            result = json.load(file)
        self.assertEqual(result["environment"]["backend"], "simt")
        self.assertEqual([case["status"] for case in result["cases"]], ["pass"] * len(result["cases"]))
        self.assertGreater(len(result["cases"]), 0)

    def test_unknown_link(self):
        self.refused("run", "harness", "--link", "laptob", says=["laptob", "did you mean laptop?"])
        self.refused("run", "harness", "--link", "laptop,dilation=fast", says=["laptop", "dilation=fast"])

    def test_link_of_processes(self):
        if "mpi" in json.loads(self.run_tandem("list", "--json", "-").stdout)["transports"]:
            self.refused("run", "harness", "--link", "laptop", "--transport", "mpi", says="only the messages of threads are shaped")
        else:
            self.refused("run", "harness", "--transport", "mpi", says="this build has no MPI")

    def test_unknown_algorithm(self):
        self.refused("train", "--algorithm", "rings", says=["--algorithm rings", "did you mean 'ring'?"])

    def test_deadline_that_is_none(self):
        self.refused("train", "--deadline", "0", says="--deadline")

    def test_result_says_what_the_world_was(self):
        out = self.path("r.json")
        done = self.run_tandem("run", "data_parallel/ranks2/accum1/fp32", "--without-peak", "--repetitions", "1", "--link",
                               "laptop,dilation=2", "--algorithm", "ring", "--adversary", "5", "--out", out)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("world: threads, link laptop dilated 2 x", done.stdout)
        with open(out, encoding="utf-8") as file:
            environment = json.load(file)["environment"]
        self.assertEqual([environment[key] for key in ("transport", "link", "algorithm", "adversary")],
                         ["threads", "laptop dilated 2 x", "ring", "5"])

    # ---- data

    def test_missing_file(self):
        self.refused("train", "--data", "/nonexistent", says=["/nonexistent", "No such file"])

    def test_empty_file(self):
        self.refused("train", "--data", self.path("empty.txt", b""), says=["empty.txt", "empty"])

    def test_binary_file(self):
        self.refused("train", "--data", self.path("b.dat", bytes([0x90, 1, 2, 3])), says=["b.dat", "not UTF-8", "offset 0"])

    def test_text_with_nul(self):
        self.refused("train", "--data", self.path("nul.txt", b"ab\0cd"), says="nul.txt")

    def test_folder_as_data(self):
        self.refused("train", "--data", self.folder.name, says="directory")

    def test_text_shorter_than_a_sample(self):
        self.refused("train", "--data", self.path("short.txt", b"hello"), says=["6 tokens", "65"])

    def test_tokens_beyond_the_vocabulary(self):
        text = self.path("t.txt", b"some text that is long enough for one sample or two " * 20)
        self.refused("train", "--data", text, "--set", "vocabulary=100", says=["255", "vocabulary of 100"])

    def test_batching_that_does_not_fit(self):
        text = self.path("text", b"one\ntwo and three\n" * 50)
        packed = [*SMALL, "--set", "batching=packed", "--set", "documents=line"]
        self.refused("train", *packed, says=["batching = packed", "synthetic"])
        self.refused("train", "--data", text, *packed, "--set", "experts=4", says=["batching = packed", "4 experts"])
        padded = [*SMALL, "--set", "batching=padded", "--set", "pad_multiple=5"]
        self.refused("train", "--data", text, *padded, says=["pad_multiple is 5", "divide the sequence of 16"])

    def test_every_batching_trains(self):
        text = self.path("text", b"one\ntwo and three\nfour, five, six and seven\n" * 50)
        for batching in ("padded", "bucketed", "packed"):
            done = self.run_tandem("train", "--data", text, *SMALL, "--set", "vocabulary=256", "--set", f"batching={batching}",
                                   "--set", "documents=line", "--set", "steps=3", "--set", "data=2")
            self.assertEqual(done.returncode, 0, done.stderr)

    def test_unknown_tokenizer(self):
        text = self.path("t.txt", b"text")
        self.refused("data", "prepare", "--input", text, "--tokenizer", "words", "--out", self.path("x"), says=["'words'", "bytes"])

    def test_inspect_nothing(self):
        self.refused("data", "inspect", self.path("nothing"), says="nothing.idx")

    # ---- configuration

    def test_heads_that_do_not_divide(self):
        self.refused("train", "--set", "heads=5", says=["heads is 5", "hidden 64"])

    def test_an_empty_folder_is_none(self):
        self.refused("train", "--steps", "1", "--out", "", says=["--out", "empty"])
        self.refused("train", "--resume", "", says=["--resume", "empty"])

    def test_a_second_place_needs_a_first(self):
        self.refused("train", "--steps", "1", "--store", self.path("store"), says=["--store", "--out"])

    def test_more_ranks_than_rows(self):
        self.refused("train", "--set", "data=9", "--set", "rows=8", says=["data is 9", "8 rows"])

    def test_more_micro_batches_than_rows(self):
        self.refused("train", "--set", "micro_batches=1000000", "--set", "rows=8", says=["micro_batches is 1000000", "8 rows"])

    def test_misspelled_key_in_a_file(self):
        self.refused("train", self.path("c.json", b'{"model": {"hiden": 64}}'), says=["model.hiden", "c.json", "model.hidden"])

    def test_file_that_is_not_json(self):
        self.refused("train", self.path("c.json", b'{"model": '), says=["c.json", "line"])

    def test_unknown_setting(self):
        self.refused("train", "--set", "foo=1", says="'foo'")

    def test_setting_without_value(self):
        self.refused("train", "--set", "heads", says="heads")

    def test_values_that_do_not_exist(self):
        for setting, exists in (("zero=4", "from 0 to 3"), ("zero=-1", "from 0 to 3"), ("precision=fp12", "bf16-autocast"),
                                ("offload=disk", "none, optimizer"), ("recompute=some", "selective"), ("gradients=half", "stored"),
                                ("attention=sparse", "materialized"), ("loss_scale=huge", "dynamic")):
            self.refused("train", "--set", setting, says=[f"plan.{setting.split('=')[0]} is", setting, exists])

    def test_plans_that_contradict_themselves(self):
        for settings, reason in ((["attention=materialized", "context=2"], "attention materialized"),
                                 (["zero=1", "bucket_bytes=1000"], "bucket_bytes has no effect with zero"),
                                 (["precision=bf16", "loss_scale=dynamic", "loss_scale_growth_factor=0.5"], "loss_scale_growth_factor")):
            self.refused("train", *[part for s in settings for part in ("--set", s)], says=reason)

    def test_steps_below_one(self):
        self.refused("train", "--steps", "-3", says=["--steps", "at least 1"])

    # ---- commands

    def test_unknown_command(self):
        self.refused("trian", says=["'trian'", "'train'"])

    def test_no_command(self):
        self.refused(says=["which command?", "train", "tandem --help"])
        self.refused("data", says=["tandem data: which command?", "prepare, inspect"])

    def test_misspelt_command_of_a_group(self):
        self.refused("data", "prepar", says=["'data prepar'", "did you mean 'prepare'?"])
        self.refused("checkpoint", "lst", self.folder.name, says=["'checkpoint lst'", "'list'"])

    def test_options_that_a_command_has_not(self):
        self.refused("train", "--stesp", "3", says=["tandem train has no option --stesp", "did you mean '--steps'?"])
        self.refused("train", "--quick", says=["tandem train has no option --quick", "tandem run", "have one"])
        self.refused("run", "--nonsense=3", says=["tandem run has no option --nonsense ", "tandem run --help"])
        self.refused("list", "word", says=["tandem list has no place for 'word'"])
        self.refused("plan", "--top", "3", says=["is required", "tandem plan --help"])

    def test_help_is_a_command_too(self):
        for words, says in ((["help"], "Subcommands"), (["help", "train"], "Keys of --set"), (["help", "data", "prepare"], "--tokenizer")):
            done = self.run_tandem(*words)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn(says, done.stdout)

    def test_numbers_that_are_none(self):
        for words in (["run", "harness/flops", "--seed"], ["run", "harness/flops", "--adversary"], ["claims", "C01", "--seed"],
                      ["trace", "compare", "x", "--rows"], ["generate", "--checkpoint", "x", "--prompt", "a", "--seed"]):
            for text in ("-1", "99999999999999999999", "", "many", "1e3", "nan"):
                self.refused(*words, text, says=[words[-1], f"'{text}' must be a whole number from 0"])
        for words, limits in ((["generate", "--checkpoint", "x", "--prompt", "a", "--temperature"], "from 0 to"),
                              (["compare", "a", "b", "--threshold"], "from 0 to 1000"), (["train", "--backoff-seconds"], "from 0 to 3600"),
                              (["data", "prepare", "--input", "x", "--out", "y", "--threads"], "from 1 to 1024")):
            for text in ("-1", "1e300", "nan", "inf", ""):
                self.refused(*words, text, says=[words[-1], f"'{text}' must be a number {limits}"])

    def test_a_folder_of_another_run(self):
        run = self.path("run")
        self.assertEqual(self.run_tandem("train", "--steps", "4", "--out", run, *SMALL).returncode, 0)
        self.refused("train", "--steps", "2", "--out", run, *SMALL, "--set", "heads=1",
                     says=[f"--out {run}", "another run", "step 4", f"--resume {run}"])
        self.assertEqual(os.listdir(run).count("step-00000002"), 0)

    def test_a_file_where_a_folder_is_due_stays(self):
        file = self.path("mine.txt", b"mine")
        self.refused("train", "--steps", "1", *SMALL, "--memory-tier", file, says=["--memory-tier", "mine.txt", "name a folder"])
        self.refused("train", "--steps", "1", *SMALL, "--out", file, says=["--out", "mine.txt"])
        with open(file, encoding="utf-8") as kept:
            self.assertEqual(kept.read(), "mine")

    def test_unknown_suite(self):
        self.refused("run", "data_paralel", says=["data_paralel", "data_parallel"])

    def test_unknown_pitfall(self):
        self.refused("pitfalls", "no_such", says="no_such")
        self.refused("pitfalls", "mean_of_rank_mean", says=["'mean_of_rank_mean'", "did you mean 'mean_of_rank_means'?"])

    def test_golden_folder_without_a_set(self):
        self.refused("golden", self.folder.name, says="config.json")

    def test_golden_plan_that_does_not_fit(self):
        for setting, reason in (("tensor=4", "does not divide heads 2"), ("pipeline=3", "3 stages of 2 layers"),
                                ("expert=2", "model.experts is 0"), ("chunks=2", "pipeline of at least 2"),
                                ("stage_layers=1-2", "stages"), ("rank_order=tensor-data", "rank_order"),
                                ("sequence_parallel=true", "tensor of at least 2"), ("context=9", "18 tokens")):
            self.refused("golden", f"{SOURCE}/results/golden/tiny", "--set", setting, says=reason)

    def test_golden_under_every_axis(self):
        for settings in (["tensor=2"], ["pipeline=2"], ["context=2"], ["data=2", "tensor=2", "pipeline=2"],
                         ["pipeline=2", "pipeline_schedule=zb-h1"], ["tensor=2", "sequence_parallel=true"]):
            done = self.run_tandem("golden", f"{SOURCE}/results/golden/tiny", *[part for s in settings for part in ("--set", s)])
            self.assertEqual(done.returncode, 0, done.stderr + done.stdout)

    def test_golden_in_sixteen_bits(self):
        for settings in (["bf16"], ["fp16", "data=3", "zero=2"], ["bf16-autocast"], ["fp8", "data=2"]):
            done = self.run_tandem("golden", f"{SOURCE}/results/golden/tiny", "--precision", settings[0],
                                   *[part for s in settings[1:] for part in ("--set", s)])
            self.assertEqual(done.returncode, 0, done.stderr + done.stdout)

    def test_golden_goes_on_after_a_folder_that_cannot_be_run(self):
        done = self.run_tandem("golden", self.folder.name, f"{SOURCE}/results/golden/tiny")
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("engine fp64", done.stdout)
        self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)

    def test_golden_deviation_counts_more_than_a_refusal(self):
        done = self.run_tandem("golden", self.folder.name, f"{SOURCE}/results/golden/tiny", "--precision", "fp16",
                               "--set", "loss_scale_initial=16777216")
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("skipped_steps", done.stdout)
        self.assertIn("loss_scale_initial", done.stdout)

    def test_compare_with_what_is_no_result(self):
        self.refused("compare", self.path("a.json", b"{}"), self.path("b.json", b"{}"), says=".json")

    def test_generate_without_a_checkpoint(self):
        self.refused("generate", "--checkpoint", self.folder.name, "--prompt", "x", says="no checkpoint here")
        for words in (["generate", "--prompt", "x", "--checkpoint"], ["train", "--resume"]):
            self.refused(*words, "/nonexistent", says="/nonexistent: no such folder; name the --out folder of a training run")

    def test_result_file_in_no_folder(self):
        self.refused("run", "harness", "--out", "/nonexistent/r.json", says=["--out", "/nonexistent"])
        self.refused("run", "harness", "--out", "/proc/r.json", says=["--out /proc/r.json", "cannot be written to"])

    def test_files_of_settings_that_are_empty(self):
        empty = self.path("empty.json", b"")
        for words in (["train", empty], ["compare", empty, empty], ["plan", "--model", empty, "--cluster", "dgx-a100", "--gpus", "8"]):
            self.refused(*words, says=["empty.json is empty"])
        self.refused("run", "harness", "--link", empty, says=["empty.json", "byte 1 of 0"])

    def test_checkpoint_folder_that_cannot_be_made(self):
        self.refused("train", "--steps", "1", "--out", "/proc/nothing", says=["--out", "/proc/nothing"])

    # ---- what works

    def test_no_space_for_the_result_is_status_4(self):
        done = self.run_tandem("run", "harness/timer", "--without-peak", "--out", "/dev/full")
        self.assertEqual(done.returncode, 4, done.stderr)
        self.assertIn("No space left", done.stderr)

    def test_every_help_ends_with_an_example(self):
        for command in (["list"], ["run"], ["train"], ["generate"], ["golden"], ["data", "prepare"], ["data", "inspect"], ["compare"],
                        ["report"], ["probe"], ["pitfalls"], ["trace", "compare"], ["trace", "merge"], ["trace", "reference"]):
            done = self.run_tandem(*command, "--help")
            self.assertEqual(done.returncode, 0)
            self.assertIn("Example", done.stdout, command)

    def test_train_resume_generate(self):
        out = self.path("run")
        text = self.path("t.txt", b"the quick brown fox jumps over the lazy dog. " * 60)
        first = self.run_tandem("train", "--data", text, "--steps", "4", "--out", out, "--json", self.path("r.json"), *SMALL)
        self.assertEqual(first.returncode, 0, first.stderr)
        with open(self.path("r.json")) as file:
            report = json.load(file)
        self.assertEqual(len(report["loss"]), 4)
        self.assertGreater(report["peak_bytes"]["activations"], 0)
        again = self.run_tandem("train", "--resume", out, "--steps", "6")
        self.assertEqual(again.returncode, 0, again.stderr)
        self.assertIn("step-00000006", again.stdout)
        other_layout = self.run_tandem("train", "--resume", out, "--steps", "8", "--set", "tensor=2", "--set", "context=2")
        self.assertEqual(other_layout.returncode, 0, other_layout.stderr)
        for setting in ("layers=2", "heads=1", "tied=false"):
            self.refused("train", "--resume", out, "--steps", "9", "--set", setting, says=["--resume", "model"])
        self.refused("train", "--resume", out, "--steps", "9", "--set", "optimizer=sgd", says=["--resume", "optimizer"])
        self.refused("train", "--resume", out, "--steps", "9", "--set", "rows=6", says=["--resume", "rows", "place in the data"])
        self.refused("train", "--resume", out, "--steps", "9", "--set", "seed=77", says=["other data", "--data"])
        said = self.run_tandem("generate", "--checkpoint", out, "--prompt", "the ", "--tokens", "9")
        self.assertEqual(said.returncode, 0, said.stderr)
        self.assertTrue(said.stdout.startswith("the "))

    def test_sixteen_bits_sharding_and_every_axis_at_once(self):
        text = self.path("t.txt", b"the quick brown fox jumps over the lazy dog. " * 60)
        settings = ["precision=bf16", "zero=3", "recompute=selective", "tensor=2", "pipeline=2", "data=2"]
        done = self.run_tandem("train", "--data", text, "--steps", "3", "--json", self.path("r.json"),
                               *[part for s in settings for part in ("--set", s)])
        self.assertEqual(done.returncode, 0, done.stderr)
        with open(self.path("r.json")) as file:
            report = json.load(file)
        self.assertLess(report["loss"][2], report["loss"][0])
        for category, within in (("parameters", 0.02), ("gradients", 0.02), ("optimizer", 0.02), ("activations", 0.1), ("workspace", 0.1)):
            measured, predicted = report["peak_bytes"][category], report["predicted_bytes"][category]
            self.assertGreater(measured, 0, category)
            self.assertLessEqual(abs(measured / predicted - 1), within, category)
        rows = done.stdout.splitlines()
        heading = next(i for i, row in enumerate(rows) if row.startswith("peak memory of a rank"))
        self.assertEqual([row.split()[0] for row in rows[heading + 1:heading + 7]],
                         ["parameters", "gradients", "optimizer", "activations", "communication", "workspace"])
        self.assertEqual(len({len(row) for row in rows[heading:heading + 7]}), 1, "the table's columns are aligned")
        self.assertNotIn("loss_scale", report)

    def test_offloaded_state_and_loss_scale_are_reported(self):
        done = self.run_tandem("train", "--steps", "6", "--json", self.path("r.json"), *SMALL, "--set", "precision=fp16", "--set", "zero=2",
                               "--set", "data=2", "--set", "offload=optimizer", "--set", "loss_scale_initial=1e30")
        self.assertEqual(done.returncode, 0, done.stderr)
        with open(self.path("r.json")) as file:
            report = json.load(file)
        self.assertEqual(report["peak_bytes"]["optimizer"], 0)
        self.assertGreater(report["host_peak_bytes"]["optimizer"], 0)
        self.assertLess(abs(report["host_peak_bytes"]["optimizer"] / report["host_predicted_bytes"]["optimizer"] - 1), 0.02)
        self.assertIn("optimizer, in host memory", done.stdout)
        self.assertEqual(report["loss_scale"], {"scale": [1e30 / 2**i for i in range(6)], "skipped": [True] * 6})
        self.assertIn("scale 5e+29  2 skipped", done.stdout)
        self.assertIn("6 of 6 steps skipped", done.stdout)

    def test_a_sharded_run_in_sixteen_bits_goes_on_where_it_was_interrupted(self):
        out = self.path("run")
        sharded = ["--set", "precision=bf16", "--set", "zero=3", "--set", "data=3", "--set", "dropout=0.1"]
        process = subprocess.Popen([TANDEM, "train", "--steps", "10000000", "--out", out, *SMALL, *sharded], stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True)
        while not process.stdout.readline().startswith("step"):
            pass
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 130, error)
        with open(os.path.join(out, "latest")) as file:
            saved = int(file.read().strip().split("-")[-1])
        runs = []
        for arguments in (["--set", "zero=3"], ["--set", "zero=0"], ["--set", "zero=2", "--set", "offload=optimizer"]):
            done = self.run_tandem("train", "--resume", out, "--out", self.path("other"), "--steps", str(saved + 3), "--json", self.path("r.json"),
                                   *arguments)
            self.assertEqual(done.returncode, 0, done.stderr)
            with open(self.path("r.json")) as file:
                report = json.load(file)
            self.assertEqual(report["first_step"], saved)
            runs.append((report["loss"], report["gradient_norm"], report["validation"]))
        self.assertEqual(runs[0], runs[1])
        self.assertEqual(runs[0], runs[2])
        whole = self.run_tandem("train", "--steps", str(saved + 3), "--json", self.path("r.json"), *SMALL, *sharded)
        self.assertEqual(whole.returncode, 0, whole.stderr)
        with open(self.path("r.json")) as file:
            self.assertEqual(json.load(file)["loss"][-3:], runs[0][0])

    def test_training_with_experts_reports_what_was_dropped(self):
        done = self.run_tandem("train", "--steps", "2", "--json", self.path("r.json"), *SMALL, "--set", "experts=4", "--set", "data=2",
                               "--set", "expert=2", "--set", "rows=2", "--set", "capacity_factor=0.5")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("assignments dropped", done.stdout)
        with open(self.path("r.json")) as file:
            experts = json.load(file)["experts"]
        self.assertGreater(experts["auxiliary_loss"][0], 0)
        for kept, dropped in zip(experts["kept_assignments"], experts["dropped_assignments"], strict=True):
            self.assertEqual(kept + dropped, 2 * 16)
            self.assertGreater(dropped, 0)

    def test_prepared_data_trains_like_its_text(self):
        text = self.path("t.txt", b"the quick brown fox jumps over the lazy dog. " * 60)
        prefix = self.path("prepared")
        self.assertEqual(self.run_tandem("data", "prepare", "--input", text, "--tokenizer", "bytes", "--out", prefix).returncode, 0)
        self.assertEqual(self.run_tandem("data", "inspect", prefix).returncode, 0)
        losses = []
        for data in (text, prefix):
            self.assertEqual(self.run_tandem("train", "--data", data, "--steps", "3", "--json", self.path("r.json"), *SMALL).returncode, 0)
            with open(self.path("r.json")) as file:
                losses.append(json.load(file)["loss"])
        self.assertEqual(losses[0], losses[1])

    def test_run_writes_a_result_that_compares_with_itself(self):
        result = self.path("r.json")
        done = self.run_tandem("run", "data_parallel/ranks2/accum1/fp32", "--without-peak", "--out", result, "--junit", self.path("j.xml"))
        self.assertEqual(done.returncode, 0, done.stderr)
        with open(result) as file:
            case = json.load(file)["cases"][0]
        self.assertEqual(case["status"], "pass")
        self.assertLess(case["equivalence"]["error_over_bound"], 1)
        self.assertEqual(self.run_tandem("compare", result, result).returncode, 0)

    def test_report_of_a_result_is_one_page_of_xml(self):
        result, page = self.path("r.json"), self.path("r.html")
        self.run_tandem("run", "data_parallel/ranks2", "--quick", "--out", result)
        self.refused("report", result, says=["--html FILE", "--charts FOLDER"])
        self.refused("report", self.path("a.json", b"{}"), "--html", page, says="a.json")
        self.refused("report", result, "--trace", result, "--html", page, says="no list 'traceEvents'")
        if not shutil.which("gnuplot"):
            self.refused("report", result, "--html", page, says="apt-get install gnuplot-nox")
            return
        done = self.run_tandem("report", result, "--html", page)
        self.assertEqual(done.returncode, 0, done.stderr)
        root = xml.etree.ElementTree.parse(page).getroot()
        self.assertEqual(root.tag, "{http://www.w3.org/1999/xhtml}html")
        self.assertGreaterEqual(len(root.findall(".//{http://www.w3.org/2000/svg}svg")), 3)
        charts = self.run_tandem("report", result, "--charts", self.path("charts"), "--format", "pdf").stdout.split()
        self.assertTrue(charts and all(open(chart, "rb").read(5) == b"%PDF-" for chart in charts))

    def test_several_results_are_compared_with_the_first(self):
        files = []
        for name, link in (("a", "none"), ("b", "wan"), ("c", "none")):
            files.append(self.path(name + ".json"))
            done = self.run_tandem("run", "data_parallel/ranks2/accum1/fp32", "--without-peak", "--link", link, "--out", files[-1])
            self.assertEqual(done.returncode, 0, done.stderr)
        a, b, _ = files
        alone = self.run_tandem("compare", a, b)
        self.assertEqual(alone.returncode, 3, alone.stderr)
        self.assertIn("--machines", alone.stdout)
        machines = self.run_tandem("compare", a, b, "--machines", "--json", self.path("ab.json"))
        self.assertEqual(machines.returncode, 1, machines.stdout)  # 10 ms for every message
        with open(self.path("ab.json"), encoding="utf-8") as file:
            gap = json.load(file)["attribution"]
        self.assertEqual(gap["verdict"], "link", gap)
        several = self.run_tandem("compare", *files, "--machines", "--json", self.path("abc.json"))
        self.assertEqual(several.returncode, 1, several.stdout)
        self.assertIn("gap belongs to", several.stdout)
        with open(self.path("abc.json"), encoding="utf-8") as file:
            self.assertEqual([one["b"] for one in json.load(file)["comparisons"]], files[1:])

    def test_a_probe_writes_a_cluster_file(self):
        self.refused("probe", "--out", self.path("no/c.json"), says=["--out", "does not exist"])
        self.refused("probe", "--out", self.path("c.json"), "--storage", "/proc/nothing", says=["--storage", "/proc/nothing"])
        out, store = self.path("c.json"), self.path("store")
        self.refused("probe", "--out", out, "--storage", store, says=[f"--storage {store}: there is no such folder", "leave --storage out"])
        os.mkdir(store)
        done = self.run_tandem("probe", "--seconds", "0.3", "--storage", store, "--out", out)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("slowest first", done.stdout)
        with open(out, encoding="utf-8") as file:
            cluster = json.load(file)
        self.assertGreater(cluster["device"]["peak_flops"]["fp32"], 0)
        self.assertEqual(len(cluster["probe"]["slowest_first"]), 2)

    def test_an_interrupt_saves_the_run(self):
        out = self.path("run")
        process = subprocess.Popen([TANDEM, "train", "--steps", "10000000", "--out", out, *SMALL], stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True)
        process.stdout.readline()  # it has begun
        while not process.stdout.readline().startswith("step"):
            pass
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 130, error)
        self.assertIn("continue with --resume", error)
        self.assertTrue(os.path.exists(os.path.join(out, "latest")))

    def test_an_interrupt_keeps_the_cases_so_far(self):
        result = self.path("r.json")
        process = subprocess.Popen([TANDEM, "run", "--full", "--without-peak", "--repetitions", "100", "--out", result],
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        process.stdout.readline()  # the machine's line: signals are caught by now
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=120)
        self.assertEqual(process.returncode, 130, error)
        with open(result) as file:
            self.assertTrue(json.load(file)["environment"]["interrupted"])


if __name__ == "__main__":
    unittest.main()
