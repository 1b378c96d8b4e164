#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Holds the results of ci/gpu.sh against the targets of docs/performance.md, or against those of an earlier run on the same card.

    gpu_targets.py OUT                        train_step.json, train_step_peer.jsonl and kernels.json in OUT
    gpu_targets.py OUT --baseline FOLDER      the step against FOLDER/train_step.json
    gpu_targets.py --self-test

Rates are by the median step on both sides. Prints a table. Exit status 1 where a target is missed, 77 where none could be judged; what
was not measured is said.
"""

import argparse
import json
import pathlib
import statistics
import sys
import tempfile

# Dense bf16 FLOP/s by the makers' data sheets; the first name that is part of the card's counts.
PEAKS = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12}
MFU = 0.50
SLOWER = 0.03  # of a step, that a baseline forgives


def read(path):
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return None
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")] if path.suffix == ".jsonl" else json.loads(text)


def median_rate(step):
    """Tokens a second of the median step; the first ones, in which graphs are recorded, do not count."""
    tokens = step["config"]["plan"]["rows"] * step["config"]["model"]["sequence"]
    return tokens / step["step_seconds"]["median"]


def rows_of_targets(out):
    """(what, measured, target, met or None)"""
    step, peer, kernels = (read(out / name) for name in ("train_step.json", "train_step_peer.jsonl", "kernels.json"))
    if step is None:
        yield "training step", "not measured", "", None
        return
    yield "tokens/s", f"{median_rate(step):.0f}", "", None
    card = (kernels or {}).get("device", "")
    peak = next((value for name, value in PEAKS.items() if name in card), None)
    flops = step["model_flops_per_second"] * median_rate(step) / step["tokens_per_second"]
    if peak:
        yield f"MFU ({step['flops_convention']}; peak {peak * 1e-12:.0f} TFLOP/s, {card})", f"{flops / peak:.3f}", f">= {MFU}", flops / peak >= MFU
    else:
        yield "MFU", f"no data sheet for '{card}'", "", None
    if kernels and kernels.get("matrix_flops_per_second"):
        yield "share of the measured matrix peak", f"{flops / kernels['matrix_flops_per_second']:.3f}", "", None
    ours = [median_rate(entry) for entry in peer or [] if "config" in entry]
    theirs = [entry["tokens_per_second"] for entry in peer or [] if entry.get("program") == "pytorch" and "tokens_per_second" in entry]
    if ours and theirs:
        ratio = statistics.median(ours) / max(theirs)
        yield "over PyTorch's best, in turns", f"{ratio:.3f}", "> 1", ratio > 1
    else:
        yield "over PyTorch's best", "not measured", "", None


def rows_of_baseline(out, baseline):
    step, before = read(out / "train_step.json"), read(baseline / "train_step.json")
    if step is None or before is None:
        yield "training step", "not measured on both sides", "", None
        return
    ratio = median_rate(step) / median_rate(before)
    yield "tokens/s over the baseline's", f"{ratio:.3f}", f">= {1 - SLOWER}", ratio >= 1 - SLOWER
    memory = sum(step["peak_bytes"].values()) / max(1, sum(before["peak_bytes"].values()))
    yield "peak memory over the baseline's", f"{memory:.3f}", "<= 1.01", memory <= 1.01


def verdict(rows):
    rows = list(rows)
    for what, measured, target, met in rows:
        print(f"{what:60s} {measured:>16s} {target:>10s} {'' if met is None else 'met' if met else 'MISSED'}".rstrip())
    if all(met is None for *_, met in rows):
        print("nothing could be judged")
        return 77
    return 1 if any(met is False for *_, met in rows) else 0


def self_test():
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder)

        def step_of(tokens):
            return {"tokens_per_second": tokens, "step_seconds": {"median": 8 / tokens}, "peak_bytes": {"a": 1},
                    "config": {"plan": {"rows": 2}, "model": {"sequence": 4}}}

        def write(tokens, flops, theirs):
            step = {**step_of(tokens), "model_flops_per_second": flops, "flops_convention": "matmul"}
            (out / "train_step.json").write_text(json.dumps(step), encoding="utf-8")
            peer = [step, {"program": "pytorch", "tokens_per_second": theirs}]
            (out / "train_step_peer.jsonl").write_text("\n".join(map(json.dumps, peer)), encoding="utf-8")
            (out / "kernels.json").write_text(json.dumps({"device": "NVIDIA H200"}), encoding="utf-8")

        expected = [(100, 600e12, 90, 0), (100, 400e12, 90, 1), (100, 600e12, 110, 1)]
        wrong = 0
        for tokens, flops, theirs, status in expected:
            write(tokens, flops, theirs)
            wrong += verdict(rows_of_targets(out)) != status
        slower = out / "before"
        slower.mkdir()
        for before, status in ((101, 0), (110, 1)):
            text = step_of(before)
            (slower / "train_step.json").write_text(json.dumps(text), encoding="utf-8")
            wrong += verdict(rows_of_baseline(out, slower)) != status
        (out / "kernels.json").unlink()
        (out / "train_step_peer.jsonl").unlink()
        wrong += verdict(rows_of_targets(out)) != 77
        (out / "train_step.json").unlink()
        wrong += verdict(rows_of_targets(out)) != 77
    print(f"self-test: {7 - wrong} of 7 right")
    return 1 if wrong else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=pathlib.Path)
    parser.add_argument("--baseline", type=pathlib.Path)
    parser.add_argument("--self-test", action="store_true")
    arguments = parser.parse_args()
    if arguments.self_test:
        return self_test()
    if arguments.out is None:
        parser.error("which folder?")
    rows = rows_of_baseline(arguments.out, arguments.baseline) if arguments.baseline else rows_of_targets(arguments.out)
    return verdict(rows)


if __name__ == "__main__":
    sys.exit(main())
