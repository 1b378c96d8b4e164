#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""record_torch_trace.py and `tandem trace` together: a right PyTorch run agrees, a fault planted in it is located.

usage: record_torch_trace_test.py TANDEM     exit status 77: skipped, because PyTorch is missing
"""
import json
import math
import pathlib
import subprocess
import sys
import tempfile
import unittest

try:
    import torch
except ImportError:
    print("skipped: this Python has no torch (set TANDEM_TORCH_PYTHON to one that has)")
    sys.exit(77)
sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).parent))
import record_torch_trace as interop  # noqa: E402

TANDEM = ""
SIZES = {"vocab_size": 61, "n_positions": 16, "n_embd": 32, "n_layer": 4, "n_head": 4, "layer_norm_epsilon": 1e-5,
         "tie_word_embeddings": True, "activation_function": "gelu_new"}


class Attention(torch.nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.c_attn, self.c_proj = heads, torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)

    def forward(self, x):
        rows, tokens, width = x.shape
        q, k, v = (part.view(rows, tokens, self.heads, -1).transpose(1, 2) for part in self.c_attn(x).split(width, dim=2))
        scores = q @ k.transpose(2, 3) / math.sqrt(width // self.heads)
        scores = scores.masked_fill(torch.ones(tokens, tokens).tril() == 0, float("-inf"))
        return self.c_proj((scores.softmax(3) @ v).transpose(1, 2).reshape(rows, tokens, width))


class Mlp(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.c_fc, self.c_proj = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return self.c_proj(torch.nn.functional.gelu(self.c_fc(x), approximate="tanh"))


class Block(torch.nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.ln_1, self.attn = torch.nn.LayerNorm(width), Attention(width, heads)
        self.ln_2, self.mlp = torch.nn.LayerNorm(width), Mlp(width)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class SmallGpt(torch.nn.Module):
    """A GPT-2 that shares nothing with transformers but its names."""

    def __init__(self, c):
        super().__init__()
        self.wte, self.wpe = torch.nn.Embedding(c["vocab_size"], c["n_embd"]), torch.nn.Embedding(c["n_positions"], c["n_embd"])
        self.h = torch.nn.ModuleList(Block(c["n_embd"], c["n_head"]) for _ in range(c["n_layer"]))
        self.ln_f = torch.nn.LayerNorm(c["n_embd"])
        self.lm_head = torch.nn.Linear(c["n_embd"], c["vocab_size"], bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class Interop(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        torch.manual_seed(3)
        self.model = SmallGpt(SIZES)
        for parameter in self.model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        for module in self.model.modules():
            if isinstance(module, torch.nn.LayerNorm):
                torch.nn.init.normal_(module.weight, mean=1, std=0.1)

    def path(self, name):
        return str(pathlib.Path(self.folder.name) / name)

    def record(self, name="trace", **options):
        torch.manual_seed(5)
        ids, targets = torch.randint(61, (4, 16)), torch.randint(61, (4, 16))
        targets[1, 10:] = -100
        interop.record_step(self.model, SIZES, ids, targets, self.path(name), **options)

    def compare(self, *traces):
        run = subprocess.run([TANDEM, "trace", "compare", *map(self.path, traces), "--json", self.path("verdict.json")],
                             capture_output=True, text=True)
        self.assertIn(run.returncode, (0, 1), run.stderr)
        with open(self.path("verdict.json")) as file:
            verdict = json.load(file)["comparisons"][0]
        self.assertEqual(run.returncode == 0, verdict["agrees"])
        return verdict

    def assert_located(self, verdict, layer, operation, phase):
        first = verdict["first_divergence"]
        self.assertIsNotNone(first, "the fault was not seen")
        self.assertEqual((first["layer"], first["operation"], first["phase"]), (layer, operation, phase), verdict["verdict"])
        self.assertGreater(first["error_over_bound"], 10)

    def test_a_right_run_agrees_in_every_tensor(self):
        self.record()
        verdict = self.compare("trace")
        self.assertTrue(verdict["agrees"], verdict["verdict"])
        self.assertEqual(verdict["incomplete"], [])

    def test_precisions_have_bounds_of_their_own(self):
        for dtype in (torch.float64, torch.bfloat16):
            self.model.to(dtype)
            self.record()
            verdict = self.compare("trace")
            self.assertTrue(verdict["agrees"], verdict["verdict"])

    def test_micro_batches_are_put_together(self):
        self.record(micro_batches=2)
        verdict = self.compare("trace")
        self.assertTrue(verdict["agrees"], verdict["verdict"])

    def test_a_projection_that_is_one_percent_too_large_is_located(self):
        self.model.h[3].attn.c_proj.register_forward_hook(lambda _, __, output: output * 1.01)
        self.record()
        self.assert_located(self.compare("trace"), 3, "attn.c_proj", "forward")

    def test_a_wrong_norm_epsilon_is_located(self):
        self.model.h[2].ln_2.eps = 1e-3
        self.record()
        self.assert_located(self.compare("trace"), 2, "ln_2", "forward")

    def test_a_fault_of_the_backward_pass_is_located(self):
        def spoil(_, __, output):
            output.register_hook(lambda gradient: gradient * 1.01)
        self.model.h[1].mlp.c_fc.register_forward_hook(spoil)
        self.record()
        self.assert_located(self.compare("trace"), 1, "mlp.c_fc", "backward")

    def test_a_parameter_gradient_that_was_added_twice_is_located(self):
        self.record(before_write=lambda: self.model.h[0].ln_1.weight.grad.mul_(2))
        self.assert_located(self.compare("trace"), 0, "ln_1.weight", "backward")

    def test_one_of_two_micro_batches_is_named(self):
        seen = []

        def spoil(_, __, output):
            seen.append(None)
            return output * 1.01 if len(seen) == 2 else output
        self.model.h[2].mlp.c_fc.register_forward_hook(spoil)
        self.record(micro_batches=2)
        verdict = self.compare("trace")
        self.assert_located(verdict, 2, "mlp.c_fc", "forward")
        self.assertEqual(verdict["first_divergence"]["micro_batch"], 1)

    def data_parallel(self, spoil_second_rank):
        """Two ranks one after the other: each has its rows, and its share of the gradients."""
        torch.manual_seed(5)
        ids, targets = torch.randint(61, (4, 16)), torch.randint(61, (4, 16))
        targets[1, 10:] = -100
        for rank, rows in enumerate((slice(0, 1), slice(1, 4))):
            handle = None
            if rank == 1 and spoil_second_rank:
                handle = self.model.h[1].attn.c_attn.register_forward_hook(lambda _, __, output: output * 1.01)
            recorder = interop.TraceRecorder(self.model, rank)
            self.model.zero_grad()
            logits = self.model(ids[rows])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[rows].flatten(), reduction="sum")
            (loss / (targets != -100).sum()).backward()
            recorder.write(self.path(f"ranks/{rank}"), SIZES, ids[rows], targets[rows], first_row=rows.start, global_rows=4,
                           gradients_reduced=False)
            if handle is not None:
                handle.remove()
        return self.compare("ranks")

    def test_data_parallel_ranks_are_put_together(self):
        verdict = self.data_parallel(spoil_second_rank=False)
        self.assertTrue(verdict["agrees"], verdict["verdict"])
        verdict = self.data_parallel(spoil_second_rank=True)
        self.assert_located(verdict, 1, "attn.c_attn", "forward")
        self.assertEqual(verdict["first_divergence"]["rank"], 1)
        self.assertEqual(verdict["first_divergence"]["slice"], "[16:64, 0:96]")

    def test_two_runs_are_compared_with_each_other(self):
        self.record("a")
        self.record("b", micro_batches=2)
        self.assertTrue(self.compare("a", "b")["agrees"])
        self.model.h[2].ln_2.eps = 1e-3
        self.record("c")
        self.assert_located(self.compare("c", "a"), 2, "ln_2", "forward")

    def test_a_reference_trace_stands_for_the_reference(self):
        self.record()
        subprocess.run([TANDEM, "trace", "reference", self.path("trace"), "--out", self.path("truth")], check=True, capture_output=True)
        self.assertTrue(self.compare("trace", "truth")["agrees"])

    def test_the_model_of_transformers_agrees(self):
        try:
            from transformers import GPT2Config, GPT2LMHeadModel
        except ImportError:
            self.skipTest("transformers is not installed")
        self.model = GPT2LMHeadModel(GPT2Config(**SIZES, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, bos_token_id=None,
                                                eos_token_id=None, attn_implementation="eager"))
        self.record()
        self.assertTrue(self.compare("trace")["agrees"])
        self.model.transformer.h[3].attn.c_proj.register_forward_hook(lambda _, __, output: output * 1.01)
        self.record()
        self.assert_located(self.compare("trace"), 3, "attn.c_proj", "forward")


if __name__ == "__main__":
    TANDEM = sys.argv.pop(1)
    unittest.main()
