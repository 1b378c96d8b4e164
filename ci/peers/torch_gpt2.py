#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures a whole training step of a GPT-2 in PyTorch, on the CPU or a GPU: forward, backward, AdamW, in fp32 or under bf16 autocast.

Prints one JSON line for each variant. A variant is eager or compile, with an AdamW implementation: eager/fused, eager/foreach,
eager/loop, compile/fused, ... The allocator is tuned as PyTorch needs it where first touches are slow (freed blocks are kept, huge
pages), by starting itself again with the environment set; --malloc default leaves the environment alone.

    torch_gpt2.py --batch 4 --sequence 256 --threads 2 --steps 5
    torch_gpt2.py --variants eager/fused,compile/fused
    torch_gpt2.py --device cuda --precision bf16 --batch 64 --sequence 1024 --vocabulary 50304 --variants compile/fused

Exit status: 0 measured, 77 PyTorch cannot be imported or sees no GPU (the reason is printed).
"""

import argparse
import json
import math
import os
import statistics
import sys
import time

SKIPPED = 77
TUNED_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4, help="rows of a step")
    parser.add_argument("--sequence", type=int, default=256, help="tokens of a row")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help="measured steps")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before them")
    parser.add_argument("--variants", default="", help="comma-separated; default: all that this PyTorch has")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="bf16: autocast, parameters stay fp32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--malloc", choices=["tuned", "default"], default="tuned")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--positions", type=int, default=1024)
    return parser.parse_args()


def restart_with_tuned_malloc():
    """glibc reads its settings when a process starts, so this process starts again."""
    if all(os.environ.get(name) == value for name, value in TUNED_MALLOC.items()):
        return
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **TUNED_MALLOC})


def make_model(torch, config):
    """A pre-LN GPT-2 with tied head. Attention is PyTorch's fused one where it exists, else the plain formula."""
    nn, functional = torch.nn, torch.nn.functional
    fused_attention = getattr(functional, "scaled_dot_product_attention", None)

    def attend(query, key, value):
        if fused_attention is not None:
            return fused_attention(query, key, value, is_causal=True)
        length = query.shape[-2]
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        hidden_from = torch.ones(length, length, dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden_from, -math.inf).softmax(-1) @ value

    class Block(nn.Module):
        def __init__(self, hidden, heads):
            super().__init__()
            self.heads = heads
            self.norm_1 = nn.LayerNorm(hidden)
            self.query_key_value = nn.Linear(hidden, 3 * hidden)
            self.attention_out = nn.Linear(hidden, hidden)
            self.norm_2 = nn.LayerNorm(hidden)
            self.widen = nn.Linear(hidden, 4 * hidden)
            self.narrow = nn.Linear(4 * hidden, hidden)

        def forward(self, stream):
            rows, length, hidden = stream.shape
            joined = self.query_key_value(self.norm_1(stream))
            query, key, value = joined.view(rows, length, 3, self.heads, hidden // self.heads).permute(2, 0, 3, 1, 4)
            mixed = attend(query, key, value).transpose(1, 2).reshape(rows, length, hidden)
            stream = stream + self.attention_out(mixed)
            return stream + self.narrow(functional.gelu(self.widen(self.norm_2(stream)), approximate="tanh"))

    class Gpt(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(config.vocabulary, config.hidden)
            self.positions = nn.Embedding(config.positions, config.hidden)
            self.blocks = nn.ModuleList([Block(config.hidden, config.heads) for _ in range(config.layers)])
            self.norm = nn.LayerNorm(config.hidden)
            for parameter in self.parameters():
                if parameter.dim() == 2:
                    nn.init.normal_(parameter, std=0.02)

        def forward(self, inputs, targets):
            stream = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
            for block in self.blocks:
                stream = block(stream)
            logits = functional.linear(self.norm(stream), self.tokens.weight)
            return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return Gpt()


def make_optimizer(torch, parameters, implementation):
    chosen = {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False}}[implementation]
    decayed = [p for p in parameters if p.dim() >= 2]
    plain = [p for p in parameters if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), **chosen)


def default_variants(torch):
    if int(torch.__version__.split(".")[0]) >= 2:
        return ["eager/foreach", "eager/fused", "compile/fused"]
    return ["eager/loop", "eager/foreach"]


def measure(torch, variant, config):
    mode, implementation = variant.split("/")
    on_gpu = config.device == "cuda"
    torch.manual_seed(1)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    model = make_model(torch, config).to(config.device)
    optimizer = make_optimizer(torch, list(model.parameters()), implementation)
    compute_loss = torch.compile(model) if mode == "compile" else model
    step_seconds, part_seconds, losses = [], [], []
    for step in range(config.warm_up + config.steps):
        block = torch.randint(config.vocabulary, (config.batch, config.sequence + 1), device=config.device)
        inputs, targets = block[:, :-1].contiguous(), block[:, 1:].contiguous()
        if on_gpu:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        with torch.autocast(config.device, torch.bfloat16, enabled=config.precision == "bf16"):
            loss = compute_loss(inputs, targets)
        forward_end = time.perf_counter()
        loss.backward()
        backward_end = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if on_gpu:
            torch.cuda.synchronize()  # the parts before are issued, not done: of a GPU only the whole step has a time
        end = time.perf_counter()
        losses.append(loss.item())
        if step >= config.warm_up:
            step_seconds.append(end - begin)
            part_seconds.append((forward_end - begin, backward_end - forward_end, end - backward_end))
    median = statistics.median(step_seconds)
    if not all(math.isfinite(loss) for loss in losses):
        raise RuntimeError(f"{variant}: the loss is not finite: {losses}")
    of_device = {"malloc": config.malloc}
    if on_gpu:
        of_device = {"device": torch.cuda.get_device_name(), "peak_bytes": torch.cuda.max_memory_allocated()}
    return {
        "program": "pytorch",
        "version": torch.__version__,
        "variant": variant,
        **of_device,
        "batch": config.batch,
        "sequence": config.sequence,
        "threads": torch.get_num_threads(),
        "precision": config.precision,
        "parameters": sum(p.numel() for p in model.parameters()),
        "first_loss": round(losses[0], 4),
        "step_seconds": {"median": median, "best": min(step_seconds), "samples": step_seconds},
        "tokens_per_second": config.batch * config.sequence / median,
        "forward_backward_optimizer_seconds": [statistics.median(part) for part in zip(*part_seconds)],
    }


def main():
    config = parse_arguments()
    if config.malloc == "tuned" and config.device == "cpu":
        restart_with_tuned_malloc()
    try:
        import torch
    except ImportError as error:
        print(f"skipped: PyTorch cannot be imported by {sys.executable}: {error}", file=sys.stderr)
        return SKIPPED
    if config.device == "cuda" and not torch.cuda.is_available():
        print("skipped: PyTorch sees no GPU", file=sys.stderr)
        return SKIPPED
    torch.set_num_threads(config.threads)
    variants = config.variants.split(",") if config.variants else default_variants(torch)
    measured = 0
    for variant in variants:
        try:
            print(json.dumps(measure(torch, variant, config)), flush=True)
            measured += 1
        except Exception as error:  # one variant that this PyTorch or this CPU cannot run does not hide the others
            reason = str(error).strip().split("\n", 1)[0]
            print(json.dumps({"program": "pytorch", "variant": variant, "error": f"{type(error).__name__}: {reason}"}), flush=True)
    return 0 if measured else 1


if __name__ == "__main__":
    sys.exit(main())
