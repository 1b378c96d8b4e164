#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs under random scripted faults must end with the bits of the undisturbed run.

    ci/soak.py path/to/tandem [--minutes 30] [--seed N] [--transport threads|mpi] [--out FILE]

Round after round until the time is used: a run is supervised while faults strike at random steps and ranks: processes are killed
and hang, also while they save and restore; numbers become NaN; bits of weights and messages flip; disks are full, checkpoints
damaged, beats lost; the supervisor itself is killed, and the scheduler asks it to leave. Whenever the supervisor ends before the
run is done, the same command is given again, as a scheduler would. Then the last checkpoint is compared with that of the run that
nothing disturbed: the hash of each of its files. One JSON line for each round; exit status 1 where one differs.
"""
import argparse
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time

STEPS = 240
SETTINGS = ["layers=2", "hidden=32", "heads=2", "vocabulary=64", "sequence=32", "rows=12", "data=2", "micro_batches=2",
            "residual_dropout=0.1", "checkpoint_every_steps=10", "checkpoint_keep=3", "evaluate_every_steps=0", "evaluate_batches=1",
            "anomaly_action=rollback", "anomaly_sample_every_steps=4", "anomaly_confirm_steps=5", "warmup_steps=20"]
# How often, out of all, and the rest of the text; {step} and {rank} are drawn.
KINDS = [(4, "kill@step={step},rank={rank}"), (2, "kill@step={step},rank={rank},during=save"),
         (1, "kill@step={step},rank={rank},during=restore"), (3, "hang@step={step},rank={rank}"),
         (1, "hang@step={step},rank={rank},during=save"), (2, "slow@step={step},rank={rank},ms=20,count=10"),
         (3, "nan@step={step},rank={rank},target=activations"), (2, "nan@step={step},rank={rank},target=gradients"),
         (2, "nan@step={step},rank={rank},target=weights"), (2, "flip@step={step},rank={rank},target=weights"),
         (1, "flip@step={step},rank={rank},target=moments"), (1, "disk_full@step={step},count=12"),
         (2, "corrupt@step={step}"), (1, "message@step={step},rank={rank}"), (1, "heartbeat@step={step},rank={rank},count=2"),
         (1, "jitter@step={step},rank={rank},ms=2,count=10"), (2, "supervisor@step={step}"), (2, "preempt@step={step}")]
MOST_STARTS = 40  # of one command, before a round is called hopeless


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tandem", type=pathlib.Path)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--transport", choices=["threads", "mpi"], default="threads")
    parser.add_argument("--out", type=pathlib.Path)
    return parser.parse_args()


def command(tandem, seed, folder, options):
    line = [str(tandem.resolve()), "train", "--steps", str(STEPS), "--set", f"seed={seed}", "--out", str(folder)]
    for setting in SETTINGS:
        line += ["--set", setting]
    return line + options


def last_hashes(folder):
    """{file: hash} of the last step's checkpoint."""
    manifest = json.loads((folder / f"step-{STEPS:08}" / "manifest.json").read_text())
    return {entry["name"]: entry["xxh128"] for entry in manifest["files"]}


def faults(chance):
    weights, texts = zip(*KINDS)
    steps = sorted(chance.sample(range(12, STEPS - 12), chance.randint(4, 9)))
    return [text.format(step=step, rank=chance.randint(0, 1))
            for step, text in zip(steps, chance.choices(texts, weights, k=len(steps)))]


def run_round(options, seed, root):
    chance = random.Random(seed)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    undisturbed, disturbed = root / "undisturbed", root / "disturbed"
    script = faults(chance)
    result = {"seed": seed, "transport": options.transport, "faults": script, "starts": 0, "equal": False}
    plain = subprocess.run(command(options.tandem, seed, undisturbed, []), capture_output=True, text=True, env=environment, check=False)
    if plain.returncode != 0:
        return {**result, "why": f"the undisturbed run: {plain.stderr[-300:]}"}
    # Steps are shorter than beats here, so that the supervisor may never see how long one takes: then a hang is one of the start.
    supervision = ["--supervise", "--heartbeat-seconds", "0.5", "--backoff-seconds", "0.1", "--max-restarts", "20",
                   "--stall-seconds", "20", "--transport", options.transport]
    if chance.random() < 0.5:
        supervision += ["--memory-tier", str(root / "memory")]
    for text in script:
        supervision += ["--fault", text]
    begin = time.monotonic()
    while result["starts"] < MOST_STARTS:
        result["starts"] += 1
        try:
            done = subprocess.run(command(options.tandem, seed, disturbed, supervision), capture_output=True, text=True,
                                  env=environment, check=False, timeout=600)
        except subprocess.TimeoutExpired:
            return {**result, "why": "hangs for 600 s"}
        if done.returncode == 0:
            break
        if done.returncode not in (130, -9):  # preempted, or the supervisor was killed
            return {**result, "why": f"exit status {done.returncode}: {done.stderr[-500:]}"}
    result["seconds"] = round(time.monotonic() - begin, 1)
    log = disturbed / "incidents.jsonl"
    result["incidents"] = [json.loads(line)["kind"] for line in log.read_text().splitlines()] if log.exists() else []
    differing = [name for name, value in last_hashes(undisturbed).items() if last_hashes(disturbed).get(name) != value]
    return {**result, "equal": not differing, "differing": differing}


def main():
    options = arguments()
    end = time.monotonic() + 60 * options.minutes
    rounds, failed = 0, 0
    while rounds == 0 or time.monotonic() < end:
        root = pathlib.Path(tempfile.mkdtemp(prefix="tandem-soak-"))
        result = run_round(options, options.seed + rounds, root)
        rounds += 1
        line = json.dumps(result)
        print(line, flush=True)
        if options.out:
            with options.out.open("a") as out:
                out.write(line + "\n")
        if result["equal"]:
            shutil.rmtree(root)
        else:
            failed += 1
            print(f"kept: {root}", flush=True)
    print(f"soak: {rounds} rounds, {failed} of them not equal to the undisturbed run")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
