#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tandem plan and tandem scale as their user meets them. Run by CTest with the program."""
import json
import os
import subprocess
import sys
import tempfile
import unittest

TANDEM = os.path.abspath(sys.argv.pop(1))
LARGE = ["--model", "gpt3-175b", "--cluster", "dgx-a100"]
CLUSTER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "ci", "peers", "simgrid", "cluster.json")
SMALL = ["--model", "gpt2-1558m", "--cluster", "pcie-a100-100gbe"]


class Scale(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def path(self, name):
        return os.path.join(self.folder.name, name)

    def run_tandem(self, *arguments, status=0):
        done = subprocess.run([TANDEM, *arguments], capture_output=True, text=True, timeout=120, cwd=self.folder.name)
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        return done.stdout

    def json_of(self, *arguments, status=0):
        """Standard output is JSON and nothing else, with sections that the report can draw."""
        document = json.loads(self.run_tandem(*arguments, "--json", "-", status=status))
        self.assertEqual(document["sections_version"], 1)
        for section in document["sections"]:
            self.assertTrue(section["title"])
            for row in section["table"]:
                self.assertEqual(len(row), len(section["table"][0]))
        return document

    def refused(self, *arguments, says):
        done = subprocess.run([TANDEM, *arguments], capture_output=True, text=True, timeout=120, cwd=self.folder.name)
        self.assertEqual(done.returncode, 2, done.stdout + done.stderr)
        self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
        self.assertIn(says, done.stderr)

    # ---- plan

    def test_the_best_layout_of_a_large_model_can_be_tried_small_and_scaled(self):
        self.run_tandem("plan", *LARGE, "--gpus", "1024", "--json", "plan.json", "--write", "twin.json")
        with open(self.path("plan.json"), encoding="utf-8") as file:
            report = json.load(file)
        self.assertGreater(report["layouts"], 100_000)
        times = [layout["step_seconds"] for layout in report["best"]]
        self.assertEqual(len(times), 5)
        self.assertEqual(times, sorted(times))
        for layout in report["best"]:
            plan = layout["plan"]
            self.assertEqual(plan["data"] * plan["tensor"] * plan["pipeline"] * plan["context"], 1024)
            self.assertTrue(layout["memory"]["fits"])
            self.assertAlmostEqual(sum(layout["parts_seconds"].values()), layout["step_seconds"], delta=1e-9 * times[0])
        for path in report["paths"]:
            self.assertGreaterEqual(path["over_best"], 1)
            self.assertGreater(len(path["steps"]), 3)

        self.run_tandem("train", "twin.json", "--data", "synthetic", "--steps", "3")

        sweep = self.json_of("scale", *LARGE, "--plan", "plan.json", "--gpus", "1024")
        best = report["best"][0]
        self.assertAlmostEqual(sweep["points"][0]["step_seconds"], best["step_seconds"], delta=1e-9 * times[0])
        self.assertEqual(sweep["points"][0]["plan"], best["plan"])

    def test_published_layouts_are_among_the_best_with_what_their_software_had(self):
        report = self.json_of("plan", *LARGE, "--gpus", "1024", "--most", "context=1", "--schedules", "1f1b,interleaved")
        degrees = [(layout["plan"]["tensor"], layout["plan"]["pipeline"]) for layout in report["best"]]
        self.assertTrue({(8, 8), (8, 16)} & set(degrees), degrees)

    def test_what_does_not_fit_is_said_with_the_nearest_miss(self):
        report = self.json_of("plan", *LARGE, "--gpus", "8", status=1)
        self.assertEqual(report["best"], [])
        self.assertIn("GiB of", report["nearest_miss"])

    def test_impossible_plans_are_refused(self):
        self.refused("plan", "--model", "gpt3-175", "--cluster", "dgx-a100", "--gpus", "8", says="did you mean gpt3-175b?")
        self.refused("plan", "--model", "gpt3-175b", "--cluster", "dgx-a10", "--gpus", "8", says="did you mean dgx-a100?")
        self.refused("plan", *LARGE, "--gpus", "1020", says="no whole number of nodes")
        self.refused("plan", *LARGE, "--gpus", "1024", "--most", "contxt=1", says="did you mean context?")
        self.refused("plan", *LARGE, "--gpus", "1024", "--precision", "bf61", says="bf61")
        self.refused("plan", "--model", "gpt2-124m", "--cluster", "dgx-a100", "--gpus", "1040", "--global-batch", "7",
                     "--most", "context=1", "--most", "pipeline=1", says="no layout deals")

    # ---- scale

    def test_communication_takes_over_as_plain_data_parallelism_grows(self):
        report = self.json_of("scale", *SMALL, "--gpus", "4,16,64,256", "--global-batch", "512")
        points = report["points"]
        shares = [point["shares"]["communication"] for point in points]
        self.assertEqual(shares, sorted(shares))
        self.assertLess(shares[0], 0.1)
        self.assertGreater(shares[-1], 0.5)
        self.assertIn("passes 10 % of the step at 16 GPUs", report["communication"])
        for point in points:
            parts = {key: value for key, value in point["shares"].items() if key != "stall"}
            self.assertAlmostEqual(sum(parts.values()), 1, places=9)
            self.assertEqual(point["plan"]["data"], point["gpus"])

    def test_weak_scaling_keeps_rows_of_a_gpu(self):
        report = self.json_of("scale", *SMALL, "--gpus", "4,64", "--per-gpu-batch", "8")
        self.assertEqual([point["plan"]["rows"] for point in report["points"]], [32, 512])
        self.assertEqual(report["points"][0]["efficiency"], 1)

    def test_sizes_that_are_not_possible_are_said_and_the_rest_is_shown(self):
        out = self.run_tandem("scale", *SMALL, "--gpus", "4,8,16", "--global-batch", "8")
        self.assertIn("16 GPUs: 8 rows a step cannot be dealt to 16 data ranks", " ".join(out.split()))
        self.refused("scale", *SMALL, "--gpus", "16,32", "--global-batch", "8", says="cannot be dealt")
        self.refused("scale", *SMALL, "--gpus", "16", "--best", "--set", "tensor=2", says="--best")
        self.refused("scale", *SMALL, "--gpus", "16", "--set", "tensro=2", says="tensor")
        self.refused("scale", *SMALL, "--gpus", "16", "--set", "data=4", says="--gpus")
        self.refused("scale", *SMALL, "--gpus", "16", "--micro-batch", "100000", says="--micro-batch")
        self.refused("scale", *SMALL, "--gpus", "16", "--per-gpu-batch", "9000000000000000000", says="--per-gpu-batch")
        self.refused("scale", "--measured", "--transport", "nccl", says="--measured computes on the CPU")
        self.refused("scale", "--published", "sc21", "--model", "gpt2-124m", says="leave --model out")
        self.refused("scale", "--published", "sc21", "--per-gpu-batch", "2", says="leave --per-gpu-batch out")
        self.refused("scale", "--measured", "--published", "sc21", says="leave --published out")
        self.refused("scale", "--measured", "--cluster", "dgx-a100", says="leave --cluster out")
        self.refused("scale", *SMALL, "--gpus", "8", "--link", "wan", says="simulates without --measured: leave --link out")
        self.refused("scale", *SMALL, "--gpus", "8", "--best", "--micro-batch", "2", says="leave --micro-batch out")
        self.refused("scale", "--model", "gpt-22b", "--clusters", "dgx-a100,dgx-h100", "--gpus", "64", "--set", "tensor=2", says="leave --set out")
        self.refused("scale", *SMALL, "--gpus", "8", "--export-programs", "p", "--json", "j", says="leave --json out")
        self.refused("scale", *SMALL, "--gpus", "8", "--chakra", "/dev/full", says="--chakra /dev/full: this is a device")
        self.refused("scale", *SMALL, "--gpus", "8", "--chakra", "/nosuch/x", says="--chakra")
        self.refused("scale", "--model", "gpt2-1558m", "--gpus", "16", says="--cluster")

    def test_programs_are_written_in_the_arithmetic_of_the_cluster(self):
        self.run_tandem("scale", "--model", "gpt2-124m", "--cluster", CLUSTER, "--gpus", "8", "--set", "pipeline=4",
                        "--export-programs", "programs")
        with open(self.path("programs"), encoding="utf-8") as file:
            head = dict(line.split(maxsplit=1) for line in file.read().splitlines()[:3])
        self.assertGreater(float(head["predicted_seconds"]), 0)
        self.assertEqual(head["ranks"], "8")

    def test_clusters_have_different_best_layouts(self):
        report = self.json_of("scale", "--model", "gpt-22b", "--clusters", "dgx-a100,gb200-nvl72,pcie-a100-100gbe", "--gpus", "64")
        self.assertEqual(len(report["sizes"][0]["clusters"]), 3)
        self.assertIn("no layout is best everywhere", report["sizes"][0]["verdict"])

    def test_published_tables_are_predicted(self):
        report = self.json_of("scale", "--published", "sc21")
        self.assertGreaterEqual(len(report["published"]), 10)
        self.assertTrue(all(row["source"] for row in report["published"]))
        self.assertIn("median error", self.run_tandem("scale", "--published", "all"))

    def test_ranks_are_measured_beside_their_prediction(self):
        report = self.json_of("scale", "--measured", "--gpus", "1,2", "--steps", "3", "--link", "pcie-25gbe,dilation=20")
        self.assertEqual([point["ranks"] for point in report["measured"]], [1, 2])
        for point in report["measured"]:
            self.assertGreater(point["step_seconds"], 0)
            self.assertGreater(point["predicted_seconds"], 0)
        self.assertGreater(report["measured"][1]["communication_share"], 0)
        self.refused("scale", "--measured", "--gpus", "2", "--set", "tensor=2", says="--measured")

    def test_examples_of_the_help_run_as_they_stand(self):
        for command in ("plan", "scale"):
            examples = [line.split()[1:] for line in self.run_tandem(command, "--help").splitlines() if line.startswith("  tandem ")]
            self.assertGreater(len(examples), 1)
            for example in examples:
                if "--measured" not in example:  # takes seconds; it is run above
                    self.run_tandem(*example)

    def test_what_the_program_knows_is_listed(self):
        known = json.loads(self.run_tandem("list", "--json", "-"))
        self.assertIn("gpt3-175b", known["models"])
        self.assertIn("dgx-a100", known["clusters"])
        self.assertIn("sc21", known["published"])


if __name__ == "__main__":
    unittest.main()
