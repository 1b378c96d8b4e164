#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`tandem checkpoint` as its user meets it. Run by CTest with the program."""
import json
import math
import os
import pathlib
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest

TANDEM = pathlib.Path(sys.argv.pop(1)).resolve()
ENVIRONMENT = {**os.environ, "PATH": f"{TANDEM.parent}{os.pathsep}{os.environ['PATH']}"}


def read_safetensors(path):
    """{name: (dtype, shape, bytes)}, and the metadata."""
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + length])
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        tensors[name] = (entry["dtype"], entry["shape"], data[begin:end])
    return tensors, metadata


class Checkpoint(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(prefix="tandem-checkpoint-")
        cls.addClassCleanup(folder.cleanup)
        cls.root = pathlib.Path(folder.name)
        cls.trained = cls.root / "trained"
        done = subprocess.run([str(TANDEM), "train", "--steps", "6", "--set", "data=2", "--set", "zero=1", "--set", "tied=false",
                               "--set", "checkpoint_every_steps=2", "--out", str(cls.trained)],
                              capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr

    def setUp(self):
        self.folder = self.root / self._testMethodName
        self.run_folder = self.folder / "run"
        shutil.copytree(self.trained, self.run_folder)

    def tandem(self, status, *arguments):
        done = subprocess.run([str(TANDEM), *map(str, arguments)], capture_output=True, text=True, errors="replace", timeout=120,
                              check=False)
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        if status == 2:
            self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
            return done.stderr
        return done.stdout

    def checkpoint(self, status, *arguments):
        return self.tandem(status, "checkpoint", *arguments)

    def listed(self, *arguments):
        return json.loads(self.checkpoint(0, "list", *arguments, "--json", "-"))["checkpoints"]

    @staticmethod
    def damage(file, byte):
        data = bytearray(file.read_bytes())
        data[byte] ^= 1
        file.write_bytes(data)

    def test_list_says_what_is_there(self):
        checkpoints = self.listed(self.run_folder)
        self.assertEqual([item["step"] for item in checkpoints], [6, 4, 2])
        for item in checkpoints:
            self.assertEqual((item["state"], item["tier"], item["files"], item["ranks"], item["layout"], item["precision"]),
                             ("whole", "local", 2, 2, "data 2 zero 1", "fp32"))
            on_disk = sum(file.stat().st_size for file in pathlib.Path(item["place"]).glob("*.safetensors"))
            self.assertEqual(item["bytes"], on_disk)
        table = self.checkpoint(0, "list", self.run_folder).splitlines()
        self.assertEqual([line.split("\t")[0] for line in table], ["step", "6", "4", "2"])
        self.assertEqual(len(self.listed(self.run_folder / "step-00000004")), 1)

    def test_list_says_where_nothing_is(self):
        (self.folder / "empty").mkdir()
        self.assertIn("no checkpoints", self.checkpoint(0, "list", self.folder / "empty"))

    def test_verify_finds_what_list_cannot(self):
        self.assertIn("3 whole, 0 damaged", self.checkpoint(0, "verify", self.run_folder))
        self.damage(self.run_folder / "step-00000004/shard-00001.safetensors", -100)
        self.assertEqual({item["state"] for item in self.listed(self.run_folder)}, {"whole"})
        text = self.checkpoint(1, "verify", self.run_folder)
        self.assertIn("2 whole, 1 damaged", text)
        self.assertRegex(text, r"step-00000004: damaged: .*shard-00001\.safetensors")
        self.checkpoint(0, "verify", self.run_folder / "step-00000006")
        self.checkpoint(1, "verify", self.run_folder / "step-00000004")

    def test_a_truncated_file_is_seen_at_once(self):
        file = self.run_folder / "step-00000006/shard-00000.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
        first = self.listed(self.run_folder)[0]
        self.assertEqual((first["step"], first["state"]), (6, "damaged"))
        self.assertIn("shard-00000.safetensors", first["damage"])

    def test_a_run_that_is_done_brings_its_last_copy_to_the_store(self):
        store = self.folder / "store"
        store.mkdir()
        in_the_way = store / "step-00000006"
        in_the_way.touch()
        again = ["train", "--resume", self.run_folder, "--steps", "6", "--store", f"file://{store}"]
        self.tandem(4, *again)
        in_the_way.unlink()
        self.assertIn("it was not in the folder", self.tandem(0, *again))
        self.assertEqual([(item["step"], item["tier"]) for item in self.listed(self.run_folder, "--store", f"file://{store}")][:2],
                         [(6, "local"), (6, "store")])
        self.assertNotIn("it was not in the folder", self.tandem(0, *again))

    def test_copies_in_a_store_are_listed_and_verified(self):
        store = self.folder / "store"
        shutil.copytree(self.run_folder, store)
        shutil.rmtree(self.run_folder / "step-00000006")
        url = f"file://{store}"
        self.assertEqual([(item["step"], item["tier"]) for item in self.listed(self.run_folder, "--store", url)],
                         [(6, "store"), (4, "local"), (4, "store"), (2, "local"), (2, "store")])
        self.assertIn("5 whole, 0 damaged", self.checkpoint(0, "verify", self.run_folder, "--store", url))
        self.damage(store / "step-00000006/shard-00000.safetensors", -100)
        self.damage(store / "step-00000002/manifest.json", 40)
        text = self.checkpoint(1, "verify", url)
        self.assertIn("1 whole, 2 damaged", text)
        self.assertIn("step-00000006/shard-00000.safetensors: the bytes are not those that were written", text)

    def test_resharded_state_trains_on_like_the_original(self):
        out = self.folder / "resharded"
        text = self.checkpoint(0, "reshard", self.run_folder, "--out", out, "--set", "data=1", "--set", "tensor=2", "--set",
                               "zero=0")
        self.assertIn("2 rank(s) (tensor 2)", text)
        self.checkpoint(0, "verify", out)
        losses = []
        for folder in (self.run_folder, out):
            report = self.folder / "report.json"
            self.tandem(0, "train", "--resume", folder, "--steps", 8, "--set", "data=2", "--set", "tensor=1", "--set", "zero=1",
                        "--json", report)
            losses.append(json.loads(report.read_text())["loss"])
        self.assertEqual(losses[0], losses[1])
        self.assertEqual(len(losses[0]), 2)

    def test_export_and_import_keep_every_parameter(self):
        exported = self.folder / "exported"
        self.assertIn("as fp32", self.checkpoint(0, "export", self.run_folder, "--out", exported))
        tensors, metadata = read_safetensors(exported / "model.safetensors")
        self.assertEqual(metadata, {"format": "pt"})
        self.assertIn("lm_head.weight", tensors)
        self.assertEqual(tensors["transformer.h.1.attn.c_attn.weight"][:2], ("F32", [64, 192]))
        config = json.loads((exported / "config.json").read_text())
        self.assertEqual((config["model_type"], config["n_embd"], config["tie_word_embeddings"]), ("gpt2", 64, False))
        self.checkpoint(0, "import", exported, "--out", self.folder / "imported")
        self.checkpoint(0, "verify", self.folder / "imported")
        self.checkpoint(0, "export", self.folder / "imported", "--out", self.folder / "again")
        self.assertEqual(read_safetensors(self.folder / "again/model.safetensors")[0], tensors)
        logits = []
        for folder in (self.run_folder, self.folder / "imported"):
            self.tandem(0, "generate", "--checkpoint", folder, "--prompt", "The ", "--tokens", 1, "--temperature", 0, "--logits",
                        self.folder / "logits.safetensors")
            logits.append(read_safetensors(self.folder / "logits.safetensors")[0])
        self.assertEqual(logits[0], logits[1])
        self.assertEqual((logits[0]["tokens"][2], logits[0]["logits"][1]), (struct.pack("<4i", *b"The "), [4, 256]))
        self.tandem(0, "train", "--resume", self.folder / "imported", "--steps", 2)
        self.checkpoint(0, "export", self.run_folder, "--out", self.folder / "narrow", "--dtype", "bf16", "--max-file-gib",
                        "0.0001")
        index = json.loads((self.folder / "narrow/model.safetensors.index.json").read_text())
        self.assertEqual(set(index["weight_map"]), set(tensors))
        for name, file in index["weight_map"].items():
            dtype, shape, _ = read_safetensors(self.folder / "narrow" / file)[0][name]
            self.assertEqual((dtype, shape), ("BF16", tensors[name][1]))

    def test_export_passes_over_a_damaged_checkpoint_and_says_so(self):
        self.damage(self.run_folder / "step-00000006/shard-00000.safetensors", -100)
        done = subprocess.run([str(TANDEM), "checkpoint", "export", str(self.run_folder), "--out", str(self.folder / "out")],
                              capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("step-00000004", done.stdout)
        self.assertIn("step-00000006", done.stderr)

    def test_where_none_is_whole_one_line_says_so(self):
        for step in (2, 4, 6):
            self.damage(self.run_folder / f"step-{step:08}/shard-00000.safetensors", -100)
        for words in (["train", "--resume", self.run_folder], ["checkpoint", "export", self.run_folder, "--out", self.folder / "out"]):
            said = self.tandem(2, *words)
            self.assertIn("none of its 3 checkpoints is whole", said)
            self.assertEqual(said.count("step-00000004/shard-00000.safetensors: damaged"), 1, said)

    def test_advice_follows_young_and_daly(self):
        advice = json.loads(self.checkpoint(0, "advise", "--save-seconds", 20, "--step-seconds", 4, "--mtbf-hours", 50000,
                                            "--nodes", 500, "--restart-seconds", 100, "--json", "-"))
        mean = 50000 * 3600 / 500
        young = math.sqrt(2 * 20 * mean)
        daly = young * (1 + math.sqrt(20 / (2 * mean)) / 3 + 20 / (18 * mean)) - 20
        self.assertEqual(advice["young"]["interval_steps"], round(young / 4))
        self.assertEqual(advice["daly"]["interval_steps"], round(daly / 4))
        interval = advice["daly"]["interval_seconds"]
        useful = interval / (mean * math.exp(100 / mean) * (math.exp((interval + 20) / mean) - 1))
        self.assertAlmostEqual(advice["daly"]["goodput"], useful, places=9)
        same = self.checkpoint(0, "advise", "--save-seconds", 20, "--step-seconds", 4, "--failures-per-day", 24 / 100)
        self.assertIn(f"--set checkpoint_every_steps={advice['daly']['interval_steps']}", same)

    def test_advice_uses_what_a_run_measured(self):
        lines = [json.loads(line) for line in (self.run_folder / "timings.jsonl").read_text().splitlines()]
        self.assertEqual([line["step"] for line in lines], [2, 4, 6])
        self.assertTrue(all(line["bytes"] > 0 and line["writing_seconds"] > 0 for line in lines), lines)
        with (self.run_folder / "timings.jsonl").open("a") as file:
            file.write('{"step": 8, "bytes')  # a run that was killed
        advice = json.loads(self.checkpoint(0, "advise", self.run_folder, "--mtbf-hours", 1, "--json", "-"))
        self.assertEqual(advice["timed_checkpoints"], 3)
        costs = sorted(line["blocking_seconds"] - line["waiting_seconds"] for line in lines)
        self.assertAlmostEqual(advice["save_seconds"], costs[1], places=12)
        self.assertGreater(advice["young"]["interval_steps"], 1)

    def test_bad_input_is_one_line(self):
        nowhere, hugging_face = self.folder / "nowhere", self.folder / "hf"
        hugging_face.mkdir()
        (hugging_face / "config.json").write_text('{"model_type": "llama"}')
        (self.folder / "empty").mkdir()
        (self.folder / "timings.jsonl").write_text("{}\n")
        for arguments, words in (
            (["list", nowhere], "nowhere"),
            (["verify", self.folder / "empty"], "there is no checkpoint"),
            (["list", "s4://bucket/prefix"], "s4://"),
            (["list", "file:///tmp", "--store", "file:///tmp"], "--store"),
            (["list", self.run_folder, "--json", nowhere / "list.json"], "--json"),
            (["export", self.folder / "empty", "--out", self.folder / "out"], "empty"),
            (["export", self.run_folder, "--out", self.run_folder], "not an empty folder"),
            (["export", self.run_folder, "--out", nowhere / "a/b"], "there is no folder"),
            (["export", self.run_folder, "--out", self.folder / "out", "--dtype", "fp8"], "--dtype"),
            (["import", nowhere, "--out", self.folder / "out"], "nowhere"),
            (["import", hugging_face, "--out", self.folder / "out"], '"model_type" is "llama"'),
            (["import", hugging_face], "--out"),
            (["reshard", self.run_folder, "--out", self.folder / "out", "--set", "hidden=32"], "--set hidden=32"),
            (["reshard", self.run_folder, "--out", self.folder / "out", "--set", "rows=4"], "--set rows=4"),
            (["reshard", self.run_folder, "--out", self.folder / "out", "--set", "tensor=3"], "tensor"),
            (["reshard", self.run_folder, "--out", self.folder / "out"], "--set"),
            (["advise", "--mtbf-hours", 1], "--save-seconds"),
            (["advise", "--save-seconds", 1], "--mtbf-hours"),
            (["advise", "--save-seconds", 1, "--mtbf-hours", 1, "--failures-per-day", 1], "one of"),
            (["advise", "--save-seconds", -1, "--mtbf-hours", 1], "--save-seconds"),
            (["advise", self.folder, "--mtbf-hours", 1], "timings.jsonl, line 1"),
            ([], "which command?"),
        ):
            with self.subTest(arguments=arguments):
                self.assertIn(words, self.checkpoint(2, *arguments))
        self.assertFalse((self.folder / "out").exists())

    def test_examples_of_the_help_run_as_they_stand(self):
        made = self.folder / "examples"
        made.mkdir()
        for name in ([], ["list"], ["verify"], ["export"], ["import"], ["reshard"], ["advise"]):
            lines = [line.strip() for line in self.checkpoint(0, *name, "--help").splitlines()]
            examples = [line for line in lines if line.startswith("tandem ")]
            self.assertTrue(examples, name)
            for example in examples:
                done = subprocess.run(shlex.split(example), cwd=made, env=ENVIRONMENT, capture_output=True, text=True, timeout=60,
                                      check=False)
                self.assertEqual(done.returncode, 0, example + done.stderr)
                self.assertIsNone(re.search("^tandem:", done.stderr, re.M), done.stderr)


if __name__ == "__main__":
    unittest.main()
