#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prepared data as other programs write and read it, and what is trained on it. Run by CTest with the program."""
import array
import glob
import json
import os
import re
import signal
import struct
import subprocess
import sys
import tempfile
import unittest

TANDEM = os.path.abspath(sys.argv.pop(1))
SMALL = ["--steps", "2", "--set", "hidden=16", "--set", "layers=1", "--set", "heads=2", "--set", "sequence=16"]
TEXT = "".join(f"the {i} tokens of line {i * i} are here\n" for i in range(400))

# Megatron-LM's codes of the types of tokens, by its documentation, and Python's.
CODES = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}


def megatron_write(prefix, code, documents):
    """As its IndexedDatasetBuilder does; a document is a list of sequences."""
    sequences = [array.array(CODES[code], sequence) for document in documents for sequence in document]
    lengths = array.array("i", map(len, sequences))
    size = array.array(CODES[code]).itemsize
    pointers = array.array("q", [size * sum(lengths[:i]) for i in range(len(lengths))])
    ends = array.array("q", [sum(map(len, documents[:d])) for d in range(len(documents) + 1)])
    with open(prefix + ".bin", "wb") as file:
        for sequence in sequences:
            sequence.tofile(file)
    with open(prefix + ".idx", "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code))
        file.write(struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(ends)))
        for values in (lengths, pointers, ends):
            values.tofile(file)


def megatron_read(prefix):
    """As its reader does: each sequence by its pointer."""
    with open(prefix + ".idx", "rb") as file:
        assert file.read(9) == b"MMIDIDX\x00\x00" and struct.unpack("<Q", file.read(8)) == (1,)
        code, count, documents = struct.unpack("<BQQ", file.read(17))
        lengths, pointers, ends = (array.array(kind) for kind in "iqq")
        lengths.fromfile(file, count)
        pointers.fromfile(file, count)
        ends.fromfile(file, documents)
        assert not file.read()
    sequences = []
    with open(prefix + ".bin", "rb") as file:
        for length, pointer in zip(lengths, pointers):
            file.seek(pointer)
            sequences.append(array.array(CODES[code]))
            sequences[-1].fromfile(file, length)
    return [[sequence.tolist() for sequence in sequences[begin:end]] for begin, end in zip(ends[:-1], ends[1:])]


class DataCommand(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.text = self.path("text", TEXT.encode())

    def path(self, name, content=None):
        path = os.path.join(self.folder.name, name)
        if content is not None:
            with open(path, "wb") as file:
                file.write(content)
        return path

    def run_tandem(self, *arguments, status=0):
        done = subprocess.run([TANDEM, *arguments], capture_output=True, text=True, errors="replace", timeout=120, check=False,
                              cwd=self.folder.name, env={**os.environ, "XDG_CACHE_HOME": self.path("home")})
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        return done.stdout if status == 0 else done.stderr

    def summary(self, *arguments):
        self.run_tandem("data", *arguments, "--json", self.path("summary"))
        with open(self.path("summary"), encoding="utf-8") as file:
            return json.load(file)

    def prepare_bpe(self):
        """None in a build without SentencePiece."""
        command = ["data", "prepare", "--input", self.text, "--documents", "line", "--tokenizer", "bpe:300", "--out", "p"]
        done = subprocess.run([TANDEM, *command], capture_output=True, text=True, timeout=120, check=False, cwd=self.folder.name)
        if "built without SentencePiece" in done.stderr:
            self.skipTest("the program is built without SentencePiece")
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def test_reads_and_writes_the_files_of_megatron(self):
        documents = [[[1, 2, 3], [4]], [], [[5, 6]], [[7] * 100]]
        for code, name in ((1, "uint8"), (8, "uint16"), (4, "int32"), (5, "int64")):
            megatron_write(self.path("m"), code, documents)
            summary = self.summary("inspect", "m")
            self.assertEqual([summary[key] for key in ("documents", "sequences", "tokens", "vocabulary", "dtype")], [4, 4, 106, 8, name])
            self.assertEqual([summary["shortest_document_tokens"], summary["longest_document_tokens"]], [0, 100])
        self.run_tandem("data", "prepare", "--input", self.text, "--documents", "line", "--out", "t", "--threads", "3")
        read = megatron_read(self.path("t"))
        self.assertEqual(["".join(map(chr, document[0][:-1])) for document in read], TEXT.splitlines())
        self.assertTrue(all(len(document) == 1 and document[0][-1] == 0 for document in read))

    def test_bpe_is_prepared_trained_on_and_generated(self):
        self.assertIn("tokenizer bpe:300, vocabulary 300, stored as uint16", self.prepare_bpe())
        self.assertIn("use --set vocabulary=300", self.run_tandem("train", "--data", "p", *SMALL, status=2))
        self.run_tandem("train", "--data", "p", *SMALL, "--set", "vocabulary=300", "--out", "run")
        said = self.run_tandem("generate", "--checkpoint", "run", "--prompt", "the tokens ", "--tokens", "5")
        self.assertTrue(said.startswith("the tokens "), said)
        for suffix in ("json", "model"):
            os.rename(self.path("p." + suffix), self.path("moved." + suffix))
        self.assertIn("p.json is not there to say with which tokenizer; name it: --tokenizer",
                      self.run_tandem("generate", "--checkpoint", "run", "--prompt", "x", status=2))
        again = self.run_tandem("generate", "--checkpoint", "run", "--prompt", "the tokens ", "--tokens", "5", "--tokenizer",
                                "moved.model")
        self.assertEqual(again, said)

    def test_a_model_that_is_damaged_is_one_line(self):
        self.path("bad.model", b"no model")
        self.prepare_bpe()
        self.assertIn("bad.model is not a SentencePiece model", self.run_tandem(
            "data", "prepare", "--input", self.text, "--tokenizer", "bad.model", "--out", "q", status=2))

    def test_an_interrupt_leaves_nothing(self):
        text = self.path("long", b"".join(b"line %d of %d\n" % (i, i * i) for i in range(200_000)))
        process = subprocess.Popen([TANDEM, "data", "prepare", "--input", text, "--documents", "line", "--tokenizer", "bytes",
                                    "--out", "i", "--threads", "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                   cwd=self.folder.name)
        self.addCleanup(process.kill)
        # Before the first chunk is there, as soon as the program looks out for signals.
        while not int(re.search(r"SigCgt:\s*(\w+)", self.status_of(process)).group(1), 16) >> (signal.SIGINT - 1) & 1:
            self.assertIsNone(process.poll(), "it ended before it could be interrupted")
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=120)[1]
        self.assertEqual(process.returncode, 130, said)
        self.assertIn("interrupted; nothing was written", said)
        self.assertEqual(sorted(os.listdir(self.folder.name)), ["long", "text"])

    @staticmethod
    def status_of(process):
        with open(f"/proc/{process.pid}/status", encoding="ascii") as file:
            return file.read()

    @staticmethod
    def remove_files_among_devices():
        for file in glob.glob("/dev/full.*") + glob.glob("/dev/tandem-test*"):
            os.remove(file)

    def test_no_file_is_written_over_by_mistake(self):
        prepare = ["data", "prepare", "--input", self.text, "--out"]
        self.assertIn("is no prefix", self.run_tandem(*prepare, "", status=2))
        self.assertIn("text.json is an input", self.run_tandem(
            "data", "prepare", "--input", self.path("text.json", b"x"), "--out", "text", status=2))
        self.assertIn("a file of the prepared data has this name",
                      self.run_tandem(*prepare, "p", "--json", "./p.json", status=2))
        self.addCleanup(self.remove_files_among_devices)
        os.mkdir(self.path("p.idx"))
        os.symlink("/dev/full", self.path("device"))
        for prefix, words in (("/dev/full", "--out /dev/full: this is a device"), ("device", "--out device: this is a device"),
                              ("/dev/tandem-test", "--out /dev/tandem-test: /dev is for devices"),
                              ("nowhere/p", "nowhere does not exist"), ("p", "p.idx is to be written, and is there as something else")):
            self.assertIn(words, self.run_tandem(*prepare, prefix, status=2))
        for option in ("--data-cache", "--data-cache-gib"):
            for data in ("synthetic", self.text):
                said = self.run_tandem("train", "--data", data, *SMALL, option, "1", status=2)
                self.assertIn(f"are about data of a store (--data s3://BUCKET/PREFIX), and --data is {data}: leave them out", said)
        for capacity in ("0", "nan", "1e30", "x"):
            self.assertIn(f"--data-cache-gib: '{capacity}' must be a number above 0",
                          self.run_tandem("train", "--data-cache-gib", capacity, status=2))

    def test_token_files_of_llmc(self):
        tokens = [50256, 11, 22, 33] * 50
        self.path("gpt2.bin", struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253) + struct.pack(f"<{len(tokens)}H", *tokens))
        summary = self.summary("inspect", "gpt2.bin")
        self.assertEqual([summary[key] for key in ("documents", "tokens", "vocabulary")], [50, 200, 50257])
        self.assertEqual(self.summary("prepare", "--input", "gpt2.bin", "--out", "g")["bin_xxh128"], summary["bin_xxh128"])
        losses = [self.run_tandem("train", "--data", data, *SMALL, "--set", "vocabulary=50257").split("step")[1].split()[2]
                  for data in ("gpt2.bin", "g")]
        self.assertEqual(losses[0], losses[1])

    def test_data_of_a_store_is_trained_on_and_kept(self):
        os.mkdir(self.path("store"))
        self.run_tandem("data", "prepare", "--input", self.text, "--out", "store/t")
        url = "file://" + self.path("store/t")
        here = self.run_tandem("train", "--data", "store/t", *SMALL)
        cold = self.run_tandem("train", "--data", url, *SMALL)
        warm = self.run_tandem("train", "--data", url, *SMALL)
        losses = [[line.split("norm")[0] for line in said.splitlines() if line.startswith("step")] for said in (here, cold, warm)]
        self.assertGreaterEqual(len(losses[0]), 2)
        self.assertEqual(losses[1], losses[0])
        self.assertEqual(losses[2], losses[0])
        self.assertIn("store   1 blocks fetched", cold)
        self.assertIn("store   0 blocks fetched", warm)
        self.assertTrue(os.path.isdir(self.path("home/tandem/data")))
        self.path("file", b"")
        self.assertIn("cannot write to the folder for cached data",
                      self.run_tandem("train", "--data", url, *SMALL, "--data-cache", "file/sub", status=4))


if __name__ == "__main__":
    unittest.main()
