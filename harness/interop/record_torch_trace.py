#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Record one training step of a PyTorch GPT-2 as a trace for `tandem trace compare` (docs/trace_format.md).

As a program: a random GPT-2 of transformers (or --checkpoint, a folder that from_pretrained() reads) on a random batch.
    python3 harness/interop/record_torch_trace.py --out build/trace --precision fp32

As a module, for any module tree with Hugging Face's names (h.0.ln_1, h.0.attn.c_attn, ..., ln_f, lm_head; a prefix such as
"transformer." is found). Between steps of a training loop:
    recorder = TraceRecorder(model)                      # hooks the modules
    loss = cross_entropy(model(ids), targets)            # any loss that is the mean over the valid tokens of the global batch
    loss.backward()
    recorder.write("trace", config, ids, targets, loss)  # before the optimizer

Needs torch; safetensors only if it is there, otherwise the files are written by hand.
"""
import argparse
import json
import math
import pathlib
import re
import struct

import torch

# Where each activation is seen: (module relative to its block, "out" or "in": what it gives or what it is given, name in the trace).
BLOCK_POINTS = [
    ("ln_1", "out", "ln_1"), ("attn.c_attn", "out", "attn.c_attn"), ("attn.c_proj", "in", "attn"),
    ("attn.c_proj", "out", "attn.c_proj"), ("ln_2", "in", "middle"), ("ln_2", "out", "ln_2"), ("mlp.c_fc", "out", "mlp.c_fc"),
    ("mlp.c_proj", "in", "mlp.gelu"), ("mlp.c_proj", "out", "mlp.c_proj"), ("", "out", "")]
CONFIG_FIELDS = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner", "layer_norm_epsilon",
                 "tie_word_embeddings", "activation_function", "embd_pdrop", "attn_pdrop", "resid_pdrop")
PRECISIONS = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
SAFETENSORS_TYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
                     torch.int64: "I64", torch.int32: "I32"}


def save_safetensors(path, tensors):
    """The format is 8 bytes of header length, a JSON header and the raw values."""
    try:
        from safetensors.torch import save_file
        return save_file(tensors, str(path))
    except ImportError:
        pass
    header, blocks, begin = {}, [], 0
    for key, tensor in tensors.items():
        block = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        header[key] = {"dtype": SAFETENSORS_TYPES[tensor.dtype], "shape": list(tensor.shape),
                       "data_offsets": [begin, begin + len(block)]}
        blocks.append(block)
        begin += len(block)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.writelines(blocks)


class TraceRecorder:
    """Hooks a model; keeps a copy of each activation and of its gradient in the order in which they come about."""

    def __init__(self, model, rank=0):
        self.model, self.rank, self.micro_batch = model, rank, 0
        self.values, self.handles = [], []  # values: (name, kind, micro_batch, tensor)
        modules = dict(model.named_modules())
        block = next((found for found in (re.fullmatch(r"(.*?)h\.0\.ln_1", name) for name in modules) if found), None)
        if block is None:
            raise SystemExit("the model has no module h.0.ln_1: its names are not Hugging Face's")
        self.prefix = block.group(1)
        points = [("drop" if self.prefix + "drop" in modules else None, "out", "embedding")]
        points += [(f"h.{layer}.{module}".rstrip("."), side, f"h.{layer}.{name}".rstrip("."))
                   for layer in range(sum(1 for name in modules if re.fullmatch(re.escape(self.prefix) + r"h\.\d+\.ln_1", name)))
                   for module, side, name in BLOCK_POINTS]
        points += [("ln_f", "out", "ln_f")]
        if points[0][0] is None:  # no dropout module: the first block's input is the embedding
            points[0] = ("h.0.ln_1", "in", "embedding")
        for module, side, name in points:
            self._hook(modules[self.prefix + module], side, name)
        self._hook(modules["lm_head"], "out", "logits")
        self.initial = {self._global(name): value.detach().clone().cpu() for name, value in model.named_parameters()}

    def _global(self, name):
        return name[len(self.prefix):] if self.prefix and name.startswith(self.prefix) else name

    def _hook(self, module, side, name):
        def seen(value):
            value = value[0] if isinstance(value, tuple) else value
            self._keep(name, "activation", value)
            if value.requires_grad:
                micro_batch = self.micro_batch
                value.register_hook(lambda gradient: self._keep("d." + name, "activation_gradient", gradient, micro_batch))

        if side == "out":
            self.handles.append(module.register_forward_hook(lambda _, __, output: seen(output)))
        else:
            self.handles.append(module.register_forward_pre_hook(lambda _, inputs: seen(inputs[0])))

    def _keep(self, name, kind, value, micro_batch=None):
        self.values.append((name, kind, self.micro_batch if micro_batch is None else micro_batch, value.detach().clone().cpu()))

    def next_micro_batch(self):
        self.micro_batch += 1

    def write(self, folder, config, ids, targets, loss=None, step=0, first_row=0, global_rows=None, gradients_reduced=True):
        """ids, targets [rows, sequence] of all micro-batches, which must have equally many rows. Removes the hooks.

        A data-parallel rank gives its own rows, which are first_row, first_row + 1, ... of the global_rows of the step, its own
        folder, and gradients_reduced=False where the gradients are still its share. `loss` is that of the whole step.
        """
        for handle in self.handles:
            handle.remove()
        folder = pathlib.Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors, entries = {}, []

        def add(name, kind, shape, value, **fields):
            key = f"{len(entries):06}.{name}"
            tensors[key] = value.contiguous()
            entries.append({"name": name, "kind": kind, "key": key, "shape": list(shape), "rank": self.rank, **fields})

        tied = "lm_head.weight" not in self.initial or bool(config.get("tie_word_embeddings", True))
        # torch.nn.Linear keeps [out, in]; the trace's matrices are [in, out]. The embedding and the head are [vocabulary, hidden] in both.
        linear = {self._global(name) + ".weight" for name, module in self.model.named_modules()
                  if isinstance(module, torch.nn.Linear)} - {"lm_head.weight"}

        def add_parameter(prefix, name, kind, value):
            if value is None or (tied and name == "lm_head.weight"):
                return
            value = value.detach().clone().cpu()
            fields = {"partial_sum": True} if kind == "parameter_gradient" and not gradients_reduced else {}
            if name in linear:
                add(prefix + name, kind, reversed(value.shape), value, transposed=True, **fields)
            else:
                add(prefix + name, kind, value.shape, value, **fields)

        for name, value in self.initial.items():
            add_parameter("", name, "parameter", value)
        rows, sequence = ids.shape
        part = ids.numel() // (self.micro_batch + 1)
        for name, kind, micro_batch, value in self.values:
            value = value.reshape(part, -1)
            begin = first_row * sequence + micro_batch * part
            add(name, kind, ((global_rows or rows) * sequence, value.shape[1]), value, micro_batch=micro_batch,
                slices=[[[begin, begin + part]], [[0, value.shape[1]]]])
        for name, value in self.model.named_parameters():
            add_parameter("d.", self._global(name), "parameter_gradient", value.grad)
        save_safetensors(folder / "values.safetensors", tensors)
        save_safetensors(folder / "batch.safetensors", {
            "ids": ids.to(torch.int32).cpu().contiguous(), "targets": targets.to(torch.int32).cpu().contiguous(),
            "row_ids": torch.arange(first_row, first_row + rows)})
        activation = next(value for _, kind, _, value in self.values if kind == "activation")
        dropout = any(module.p > 0 and module.training for module in self.model.modules() if isinstance(module, torch.nn.Dropout))
        index = {"format": "tandem-trace-1", "framework": f"pytorch {torch.__version__}", "precision": PRECISIONS[activation.dtype],
                 "model": {field: config[field] for field in CONFIG_FIELDS if config.get(field) is not None}, "step": step,
                 "dropout": "other" if dropout else "off", "loss": float(loss) if loss is not None and math.isfinite(loss) else None,
                 "batch": "batch.safetensors", "file": "values.safetensors", "entries": entries}
        (folder / "trace.json").write_text(json.dumps(index, indent=1))


def build_model(arguments):
    from transformers import GPT2Config, GPT2LMHeadModel
    if arguments.checkpoint:
        return GPT2LMHeadModel.from_pretrained(arguments.checkpoint, attn_implementation="eager")
    config = GPT2Config(vocab_size=arguments.vocabulary, n_positions=arguments.sequence, n_embd=arguments.hidden,
                        n_layer=arguments.layers, n_head=arguments.heads, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
                        bos_token_id=None, eos_token_id=None, attn_implementation="eager")
    model = GPT2LMHeadModel(config)
    with torch.no_grad():  # zero biases and unit norm weights would hide faults
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def record_step(model, config, ids, targets, folder, micro_batches=1, before_write=lambda: None):
    """Forward and backward of one step, recorded into `folder`; the loss is the mean over the step's valid tokens."""
    recorder = TraceRecorder(model)
    model.zero_grad()
    valid = (targets != -100).sum()
    total = 0.0
    for index, (x, y) in enumerate(zip(ids.chunk(micro_batches), targets.chunk(micro_batches))):
        if index > 0:
            recorder.next_micro_batch()
        output = model(x)
        logits = getattr(output, "logits", output)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum") / valid
        loss.backward()
        total += loss.item()
    before_write()
    recorder.write(folder, config, ids, targets, total)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder of the trace")
    parser.add_argument("--precision", choices=sorted(PRECISIONS.values()), default="fp32", help="of parameters and activations")
    parser.add_argument("--checkpoint", help="folder of a Hugging Face GPT-2; otherwise a random one of the sizes below")
    for option, default in (("vocabulary", 101), ("sequence", 24), ("hidden", 48), ("layers", 4), ("heads", 4), ("rows", 4),
                            ("micro-batches", 1), ("seed", 1)):
        parser.add_argument("--" + option, type=int, default=default)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    dtype = next(key for key, name in PRECISIONS.items() if name == arguments.precision)
    model = build_model(arguments).to(dtype).eval() if arguments.checkpoint else build_model(arguments).to(dtype)
    ids = torch.randint(model.config.vocab_size, (arguments.rows, min(arguments.sequence, model.config.n_positions)))
    targets = torch.randint(model.config.vocab_size, ids.shape)
    targets[0, -3:] = -100
    record_step(model, model.config.to_dict(), ids, targets, arguments.out, arguments.micro_batches)
    print(f"{arguments.out}: recorded; now: tandem trace compare {arguments.out}")


if __name__ == "__main__":
    main()
