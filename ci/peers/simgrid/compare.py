#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A second opinion on predicted steps: SimGrid plays the same programs with flows over ports of its own.

    compare.py [--only TEXT] [--markdown FILE] path/to/tandem

tandem writes each step (scale --export-programs, docs/formats.md) with its own prediction in the first lines; simgrid_replay, built here,
takes nothing from it but what is computed, what is sent and the links. First it is itself held against closed forms. Prints a table:
ranks, what each of the two says, the share of the step that is not computing, the ratio, messages, seconds of SimGrid. Exit status: 0 all ratios within 5 % of 1, 1 not, 77 SimGrid
or a compiler is not installed (the reason is printed). Nothing is installed or kept.
"""
import argparse
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

SKIPPED = 77
BOUND = 0.05
HERE = pathlib.Path(__file__).resolve().parent
# CM02 is the plain model of flows that share links: no fitted factors, no window of TCP, no acknowledgements in the way back.
FLAGS = ["--cfg=network/model:CM02", "--cfg=network/crosstraffic:0", "--cfg=network/TCP-gamma:0", "--cfg=contexts/stack-size:256",
         "--log=root.thres:error"]

# name, ranks, micro-batches of one row, model, settings
CASES = [
    ("1f1b", 64, 64, "gpt-39.1b", "pipeline=16"),
    ("1f1b", 256, 64, "gpt-39.1b", "pipeline=16"),
    ("1f1b", 1024, 64, "gpt-39.1b", "pipeline=16"),
    ("gpipe", 64, 64, "gpt-39.1b", "pipeline=16 pipeline_schedule=gpipe"),
    ("interleaved, 3 chunks", 64, 64, "gpt-39.1b", "pipeline=16 chunks=3"),
    ("interleaved, 3 chunks", 256, 64, "gpt-39.1b", "pipeline=16 chunks=3"),
    ("zb-h1", 64, 64, "gpt-39.1b", "pipeline=16 pipeline_schedule=zb-h1"),
    ("zb-h1", 256, 64, "gpt-39.1b", "pipeline=16 pipeline_schedule=zb-h1"),
    ("zb-v", 128, 32, "gpt-39.1b", "pipeline=8 pipeline_schedule=zb-v chunks=2"),
    ("1f1b, tensor in node", 64, 16, "gpt-39.1b", "tensor=8 pipeline=8"),
    ("1f1b, tensor in node, sequence parallel", 256, 16, "gpt-39.1b", "tensor=8 pipeline=16 sequence_parallel=true"),
    ("1f1b, tensor in node", 1024, 16, "gpt-39.1b", "tensor=8 pipeline=16"),
    ("buckets behind the backward pass", 128, 16, "gpt-39.1b", "pipeline=8 overlap_gradients=true bucket_bytes=500000000"),
    ("zero 1", 64, 8, "gpt-39.1b", "pipeline=4 zero=1 overlap_gradients=true"),
    ("zero 3, tensor in node", 64, 2, "gpt-1.7b", "tensor=8 zero=3"),
    ("context between nodes", 256, 8, "gpt-39.1b", "tensor=8 pipeline=8 context=4"),
    ("data parallel alone", 64, 1, "gpt-1.7b", ""),
    ("data parallel alone", 128, 1, "gpt-1.7b", ""),
    ("tensor between nodes", 128, 2, "gpt-39.1b", "tensor=16 pipeline=8"),
    ("buckets beside tensor sums", 64, 2, "gpt-7.5b", "tensor=2 overlap_gradients=true bucket_bytes=500000000"),
]


def skip(reason):
    print(f"skipped: {reason}")
    sys.exit(SKIPPED)


def build(folder):
    compiler = shutil.which("c++") or skip("no c++ compiler")
    probe = subprocess.run([compiler, "-std=c++20", "-fsyntax-only", "-x", "c++", "-"], input="#include <simgrid/s4u.hpp>\n", text=True,
                           capture_output=True, check=False)
    if probe.returncode != 0:
        skip("SimGrid's headers are not installed (libsimgrid-dev)")
    program = folder / "simgrid_replay"
    subprocess.run([compiler, "-std=c++20", "-O2", "-Wall", "-Wextra", *map(str, sorted(HERE.glob("*.cpp"))), "-o", str(program), "-lsimgrid"],
                   check=True)
    return program


def play(program, schedule):
    """What was predicted, what SimGrid says, messages."""
    done = subprocess.run([program, str(schedule), *FLAGS], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"simgrid_replay: exit status {done.returncode}: {done.stderr or done.stdout}")
    _, predicted, simulated, messages = done.stdout.split()
    return float(predicted), float(simulated), int(messages)


def waiting_share(schedule, predicted):
    """Of the predicted step, what the stage that computes most does not compute: bubbles and communication that nothing hides."""
    busy = [0.0]
    for line in schedule.read_text().splitlines():
        if line.startswith("program"):
            busy.append(0.0)
        elif line.startswith("compute"):
            busy[-1] += float(line.split()[1])
    return 1 - max(busy) / predicted


def closed_forms():
    """Schedules whose time follows on paper: name, text, least and most seconds. 8 devices a node, 240 GB/s and 3 us in it, 22.5 GB/s and
    5 us beyond."""
    head = "tandem-programs 1\npredicted_seconds 0\nranks {}\nlevel 8 240e9 3e-6 near\nlevel 0 22.5e9 5e-6 far\n"
    size = 1.6e9
    for ranks, rate, ring_latency in ((8, 240e9, 7 * 3e-6), (32, 8 * 22.5e9, 28 * 3e-6 + 4 * 5e-6)):
        groups = "".join(f"group pipeline {rank}\n" for rank in range(ranks)) + "group gradient " + " ".join(map(str, range(ranks))) + "\n"
        moving = 2 * (ranks - 1) / ranks * size / rate
        # Where the way out of a node is what takes longest, the latency of the others' ways passes meanwhile.
        least = moving if ranks > 8 else moving + 2 * ring_latency
        text = head.format(ranks) + groups + f"program 0\ncollective all_reduce gradient {size:.0f}\nend\n"
        yield f"ring of {ranks}", text, least, moving + 2 * ring_latency
    stages, batches, forward = 4, 8, 0.01
    text = head.format(stages) + "group pipeline " + " ".join(map(str, range(stages))) + "\n"
    for stage in range(stages):
        text += f"program {stage}\n"
        for _ in range(batches):
            text += f"recv {stage - 1} 24000000\n" if stage else ""
            text += f"compute {forward}\n"
            text += f"send {stage + 1} 24000000\n" if stage + 1 < stages else ""
        text += "end\n"
    seconds = (batches + stages - 1) * forward + (stages - 1) * (3e-6 + 24e6 / 240e9)
    yield "a pipeline's forward passes", text, seconds, seconds


def judge_is_sound(program, folder):
    sound = True
    for name, text, least, most in closed_forms():
        file = folder / "closed_form"
        file.write_text(text)
        simulated = play(program, file)[1]
        good = 0.999 * least <= simulated <= 1.001 * most
        sound &= good
        paper = f"{least:.6f} s" if least == most else f"{least:.6f} to {most:.6f} s"
        print(f"{name}: {simulated:.6f} s, on paper {paper}{'' if good else ': SimGrid does not model what is meant'}", flush=True)
    return sound


def export(tandem, case, file):
    _, ranks, micro_batches, model, settings = case
    degrees = dict(setting.split("=") for setting in settings.split())
    shard = 1
    for axis in ("tensor", "pipeline", "context"):
        shard *= int(degrees.get(axis, 1))
    arguments = ["scale", "--model", model, "--cluster", str(HERE / "cluster.json"), "--gpus", str(ranks), "--global-batch",
                 str(micro_batches * ranks // shard), "--micro-batch", "1", "--export-programs", str(file)]
    for setting in settings.split():
        arguments += ["--set", setting]
    done = subprocess.run([tandem, *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"tandem {' '.join(arguments)}: exit status {done.returncode}: {done.stderr}")


def main():
    parser = argparse.ArgumentParser(usage=__doc__.replace("%", "%%"))
    parser.add_argument("tandem", type=pathlib.Path)
    parser.add_argument("--only", default="", help="cases whose name, ranks or settings contain this text")
    parser.add_argument("--markdown", type=pathlib.Path)
    arguments = parser.parse_args()
    cases = [case for case in CASES if arguments.only in f"{case[0]} {case[1]} {case[4]}"]
    if not cases:
        parser.error(f"no case has '{arguments.only}' in it")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        program = build(folder)
        if not judge_is_sound(program, folder):
            return 1
        lines = ["| schedule | ranks | tandem s | waiting | SimGrid s | ratio | messages | SimGrid's wall s |", "|" + " --- |" * 8]
        print("\n".join(lines), flush=True)
        worst = 0.0
        for case in cases:
            file = folder / "schedule"
            export(arguments.tandem.resolve(), case, file)
            begin = time.monotonic()
            predicted, simulated, messages = play(program, file)
            ratio = simulated / predicted
            worst = max(worst, abs(ratio - 1))
            lines.append(f"| {case[0]}: {case[4] or 'no settings'} | {case[1]} | {predicted:.4f} "
                         f"| {100 * waiting_share(file, predicted):.0f} % | {simulated:.4f} | {ratio:.4f} | {messages} "
                         f"| {time.monotonic() - begin:.1f} |")
            print(lines[-1] + ("" if abs(ratio - 1) <= BOUND else " <- beyond 5 %"), flush=True)
    if arguments.markdown:
        arguments.markdown.write_text("\n".join(lines) + "\n")
    print(f"{len(cases)} steps, the worst {100 * worst:.2f} % apart")
    return 0 if worst <= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
