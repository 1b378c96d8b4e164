#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`tandem trace` as its user meets it, on a trace written by hand from docs/trace_format.md. Run by CTest with the program."""
import json
import os
import random
import struct
import subprocess
import sys
import tempfile
import unittest

TANDEM = os.path.abspath(sys.argv.pop(1))
VOCABULARY, SEQUENCE, HIDDEN, ROWS = 7, 4, 4, 2
MODEL = {"vocab_size": VOCABULARY, "n_positions": SEQUENCE, "n_embd": HIDDEN, "n_layer": 1, "n_head": 2}
SHAPES = {"wte.weight": [VOCABULARY, HIDDEN], "wpe.weight": [SEQUENCE, HIDDEN], "ln_f.weight": [HIDDEN], "ln_f.bias": [HIDDEN]}
for part, (rows, columns) in {"attn.c_attn": (4, 12), "attn.c_proj": (4, 4), "mlp.c_fc": (4, 16), "mlp.c_proj": (16, 4)}.items():
    SHAPES |= {f"h.0.{part}.weight": [rows, columns], f"h.0.{part}.bias": [columns]}
for part in ("ln_1", "ln_2"):
    SHAPES |= {f"h.0.{part}.weight": [4], f"h.0.{part}.bias": [4]}


def write_safetensors(path, tensors):
    """tensors: {key: (dtype, shape, values)}"""
    header, data = {}, b""
    for key, (dtype, shape, values) in tensors.items():
        block = struct.pack(f"<{len(values)}{'f' if dtype == 'F32' else 'i'}", *values)
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(block)]}
        data += block
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)


class Trace(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        numbers = random.Random(1)
        single = struct.Struct("<f")
        self.weights = {name: [single.unpack(single.pack(numbers.gauss(0, 0.3)))[0] for _ in range(self.count(shape))]
                        for name, shape in SHAPES.items()}
        self.ids = [numbers.randrange(VOCABULARY) for _ in range(ROWS * SEQUENCE)]
        self.embedding = [self.weights["wte.weight"][self.ids[t] * HIDDEN + i] + self.weights["wpe.weight"][t % SEQUENCE * HIDDEN + i]
                          for t in range(ROWS * SEQUENCE) for i in range(HIDDEN)]

    @staticmethod
    def count(shape):
        return shape[0] * (shape[1] if len(shape) > 1 else 1)

    def path(self, name):
        return os.path.join(self.folder.name, name)

    def write(self, name, embedding, rows=(0, ROWS), **fields):
        """The rows [begin, end) of the batch as one rank has them, with all weights."""
        folder = self.path(name)
        os.makedirs(folder)
        tokens = slice(rows[0] * SEQUENCE, rows[1] * SEQUENCE)
        shape = [rows[1] - rows[0], SEQUENCE]
        write_safetensors(os.path.join(folder, "batch.safetensors"), {
            "ids": ("I32", shape, self.ids[tokens]), "targets": ("I32", shape, self.ids[tokens]),
            "row_ids": ("I32", [shape[0]], list(range(*rows)))})
        tensors = {key: ("F32", SHAPES[key], values) for key, values in self.weights.items()}
        part = embedding[tokens.start * HIDDEN:tokens.stop * HIDDEN]
        tensors["embedding"] = ("F32", [len(part)], part)
        write_safetensors(os.path.join(folder, "values.safetensors"), tensors)
        entries = [{"name": key, "kind": "parameter", "shape": shape} for key, shape in SHAPES.items()]
        entries.append({"name": "embedding", "kind": "activation", "shape": [ROWS * SEQUENCE, HIDDEN], "rank": rows[0],
                        "slices": [[[tokens.start, tokens.stop]], [[0, HIDDEN]]]})
        index = {"format": "tandem-trace-1", "framework": "by hand", "precision": "fp32", "model": MODEL, "dropout": "off",
                 "batch": "batch.safetensors", "file": "values.safetensors", "entries": entries} | fields
        with open(os.path.join(folder, "trace.json"), "w") as file:
            json.dump(index, file)
        return folder

    def run_trace(self, status, *arguments):
        done = subprocess.run([TANDEM, "trace", *arguments], capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        if status == 2:
            self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
        return done.stdout + done.stderr

    def test_a_right_trace_agrees(self):
        self.assertIn("agrees: 1 tensors", self.run_trace(0, "compare", self.write("a", self.embedding)))

    def test_a_wrong_value_is_located(self):
        self.embedding[5 * HIDDEN + 2] *= 1.01
        text = self.run_trace(1, "compare", self.write("a", self.embedding), "--json", self.path("v.json"))
        self.assertIn("diverges: 1 of 1 tensors; first embedding, forward", text)
        self.assertIn("element [5, 2]", text)
        with open(self.path("v.json")) as file:
            first = json.load(file)["comparisons"][0]["first_divergence"]
        self.assertEqual((first["operation"], first["element"], first["problem"]), ("embedding", 22, "beyond bound"))

    def test_folders_of_ranks_are_one_trace_and_can_be_merged(self):
        good, bad = list(self.embedding), list(self.embedding)
        bad[6 * HIDDEN] += 1
        for name, embedding in (("good", good), ("bad", bad)):
            os.makedirs(self.path(name))
            for row in range(ROWS):
                self.write(f"{name}/{row}", embedding, rows=(row, row + 1))
        self.run_trace(0, "compare", self.path("good"))
        text = self.run_trace(1, "compare", self.path("bad"))
        self.assertIn("rank 1, micro-batch 0, slice [4:8, 0:4], element [6, 0]", text)
        self.assertIn("joined", self.run_trace(0, "merge", self.path("good/0"), self.path("good/1"), "--out", self.path("joined")))
        self.run_trace(0, "compare", self.path("joined"))
        self.assertIn("no row 0", self.run_trace(2, "compare", self.path("good/1")))

    def test_the_reference_fills_in_every_tensor(self):
        trace = self.write("a", self.embedding)
        self.run_trace(0, "reference", trace, "--out", self.path("truth"))
        self.assertIn("agrees", self.run_trace(0, "compare", trace, self.path("truth")))
        with open(self.path("truth/trace.json")) as file:
            names = {entry["name"] for entry in json.load(file)["entries"]}
        self.assertLess({"h.0.attn", "logits", "d.h.0.mlp.gelu", "d.wte.weight", "wte.weight"}, names)

    def test_two_traces_are_compared_or_each_with_its_reference(self):
        a = self.write("a", self.embedding)
        self.embedding[0] += 0.5
        b = self.write("b", self.embedding)
        self.run_trace(0, "compare", a, a)
        self.run_trace(1, "compare", a, b)
        self.assertIn("agrees", self.run_trace(1, "compare", a, b, "--against", "reference"))

    def test_bad_input_is_refused_in_one_line(self):
        self.assertIn("no such folder", self.run_trace(2, "compare", self.path("nowhere")))
        self.assertIn("no trace.json", self.run_trace(2, "compare", self.folder.name))
        trace = self.write("a", self.embedding, precision="fp33")
        self.assertIn('field "precision"', self.run_trace(2, "compare", trace))
        self.assertIn("masks are those of another program",
                      self.run_trace(2, "compare", self.write("b", self.embedding, dropout="other")))
        self.run_trace(2, "merge", self.path("b"))
        deep = self.write("c", self.embedding, model=MODEL | {"n_layer": 1000000000})
        self.assertIn('field "n_layer"', self.run_trace(2, "compare", deep))

    def test_a_trace_is_not_overwritten_by_what_is_made_of_it(self):
        trace = self.write("a", self.embedding)
        for command in ("reference", "merge"):
            self.assertIn("the trace itself", self.run_trace(2, command, trace, "--out", trace + "/"))
        self.run_trace(0, "compare", trace)

    def test_a_command_is_needed(self):
        self.run_trace(2)

    def test_help_shows_examples(self):
        self.assertIn("tandem trace compare build/trace", self.run_trace(0, "--help"))


if __name__ == "__main__":
    unittest.main()
