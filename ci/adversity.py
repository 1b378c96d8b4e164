#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the world does to a program: signals, full, failing and slow disks, clocks that jump, at random moments.

    ci/adversity.py path/to/tandem [--rounds 20] [--seed 7] [--only NAME ...] [--quick] [--shims FOLDER]

Each round is one scenario with numbers drawn from its seed, and one line that names both: `--rounds 1 --seed S --only NAME` does it
again. Afterwards nothing may be lost: exit status as documented, one line that says why, no process left, no file half there or left
over, the newest checkpoint whole, and a run that goes on ends with the bytes of the run that nobody disturbed.
"""
import argparse
import contextlib
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from adversity_tools import (STEPS, SUPERVISION, Tools, Wrong, complaints, contents, finished, last_hashes, litter, placed, processes_of,
                             require, require_no_process, require_whole_and_go_on, send, start)

ASKS = ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"]
DISKS = ["full", "quota", "sync", "write", "rename", "short"]
CLOCKS = [3600, -3600, 315360000, -315360000]


def signals(tools, chance, out):
    harmless = [chance.choice(["SIGWINCH", "SIGCHLD", "SIGSTOP", "SIGCONT"]) for _ in range(chance.randint(0, 3))]
    last = chance.choice([*ASKS, "SIGINT twice", "SIGKILL", "SIGQUIT", "SIGPIPE", "none"])
    when = chance.uniform(0.05, 1.0) * tools.seconds
    process = start(tools, tools.train(out))
    begin = time.monotonic()
    for name in harmless:
        time.sleep(when / (len(harmless) + 1))
        send(process, name)
    time.sleep(max(0.0, begin + when - time.monotonic()))
    if last == "SIGPIPE":
        process.stdout.close()
    elif last != "none":
        send(process, last.split()[0])
    if last == "SIGINT twice":
        time.sleep(chance.uniform(0, 2.5))
        send(process, "SIGINT")
    if last == "SIGPIPE":
        process.stdout = None
    status, _, errors = finished(process)
    number = getattr(signal, last, None)
    # A signal of the first moments, before there is a handler, ends any program.
    allowed = {"none": {0}, "SIGPIPE": {0, -signal.SIGPIPE}, "SIGKILL": {0, -9}, "SIGQUIT": {0, -3},
               "SIGINT twice": {0, 130, -2}}.get(last, {0, 130, -(number or 0)})
    require(status in allowed, f"{last}: status {status}, not of {allowed}: {errors[-300:]}")
    saved = any(out.glob("step-????????"))
    if status == 130 and last != "SIGINT twice":
        require(saved and "continue with --resume" in errors, "interrupted, and nothing saved or said:", errors)
    require_no_process(out)
    if status < 0 and not saved:
        shutil.rmtree(out, ignore_errors=True)
    require_whole_and_go_on(tools, out)
    return f"{'+'.join([*harmless, last])} after {when:.2f} s: status {status}"


def supervised(tools, chance, out):
    transport = chance.choice(["threads", "mpi"]) if shutil.which("mpirun") else "threads"
    blow = chance.choice([*ASKS, "SIGSTOP", "SIGKILL of the supervisor", "SIGKILL of it, a worker stopped", "SIGKILL of a worker",
                          "SIGSTOP of a worker"])
    options = [*SUPERVISION, "--transport", transport]
    process = start(tools, tools.train(out, *options))
    end = time.monotonic() + 30
    while not any(out.glob("step-????????")) and process.poll() is None and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(chance.uniform(0, 0.3))
    workers = [pid for pid, words in processes_of(out).items() if "--attempt" in words and words[0].endswith(tools.tandem)]
    victim = chance.choice(sorted(workers)) if workers else None
    with contextlib.suppress(ProcessLookupError):
        if "worker" in blow and victim:
            os.kill(victim, signal.SIGKILL if "KILL of a" in blow else signal.SIGSTOP)
        if not blow.endswith("of a worker"):
            send(process, blow.split()[0].rstrip(","))
    gone = "SIGKILL of" in blow and not blow.endswith("of a worker")
    if gone:
        process.wait()
        process.stdout.close()
        process.stderr.close()
        status = process.returncode
        require_no_process(out, 10)
    else:
        status, _, errors = finished(process)
        require(status in ({0, 130} if blow in ASKS else {0}), f"{transport}, {blow}: status {status}: {errors[-300:]}")
        require_no_process(out)
    require_whole_and_go_on(tools, out, options)
    return f"{transport}, {blow}: status {status}"


def hung(tools, chance, out):
    """Without a supervisor: the others say who hangs, and end it."""
    transport = chance.choice(["threads", "mpi"]) if shutil.which("mpirun") else "threads"
    step = chance.randint(20, STEPS - 1)
    words = tools.train(out, "--transport", transport, "--deadline", "1", "--fault", f"hang@step={step},rank=1")
    process = start(tools, words, ["mpirun", "-n", "2", "--oversubscribe"] if transport == "mpi" else [])
    status, _, errors = finished(process, 60)
    require(status == 4, f"{transport}: status {status}: {errors[-300:]}")
    require("rank 1" in complaints(errors)[-1] and "it hangs" in complaints(errors)[-1], "rank and reason are not said:", errors[-400:])
    require_no_process(out, 5)
    require_whole_and_go_on(tools, out)
    return f"{transport}, at step {step}: status {status}"


def interrupted_commands(tools, chance, out):
    name = chance.choice(sorted(tools.commands))
    blow = chance.choice([*ASKS, "SIGKILL", "SIGSTOP"])
    whole, seconds = tools.reference_of(name)
    if whole is None:
        return "skipped: the machine is too busy to be probed"
    out.mkdir()
    words = placed(tools.commands[name][0], out)
    process = start(tools, words)
    when = chance.uniform(0, 1.1) * seconds
    time.sleep(when)
    send(process, blow)
    status, _, errors = finished(process)
    if name == "probe" and "too busy" in errors:
        return "skipped: the machine is too busy to be probed"
    number = getattr(signal, blow)
    require(status in (({0} if blow == "SIGSTOP" else {0, 130, -number})), f"{name}, {blow}: status {status}: {errors[-300:]}")
    require_parts_of(tools, name, out, whole, status)
    if status != 0:
        # Given again it does what it was to do, as it stands or in a new place, and nothing is left of the first time.
        status_again, _, errors = finished(start(tools, words))
        if status_again == 2 and name in ("export", "import", "reshard"):
            require(len(complaints(errors)) == 1, errors)
        else:
            require(status_again == 0, f"{name} again: status {status_again}: {errors[-300:]}")
            require_parts_of(tools, name, out, whole, 0)
    return f"{name}, {blow} after {when:.2f} s: status {status}"


def require_parts_of(tools, name, out, whole, status):
    """Each file is there whole or not at all; after success all are."""
    found = contents(out)
    left = litter(out)
    # A folder that was begun waits for the next command of its name, which removes it.
    require(status not in (0, 4) or not left, f"{name}: left over: {left}")
    require(all(not one.endswith(".tmp") for one in left), f"{name}: left over, and nothing removes it: {left}")
    if status == 0:
        require(set(found) == set(whole), f"{name}: files {sorted(found)}, not {sorted(whole)}")
    if tools.commands[name][1]:
        for file, value in found.items():
            inside = any(part in file for part in (".unfinished", ".replaced"))
            require(inside or whole.get(file) in (value, None), f"{name}: {file} is there, with other bytes")


def bad_disk(tools, chance, out):
    mode, at = chance.choice(DISKS), chance.randint(1, 300)
    out.mkdir()
    process = start(tools, tools.train(out, "--json", out / "report.json", "--metrics", out / "metrics.jsonl"),
                    LD_PRELOAD=tools.shims["kill_shim"], KILL_SHIM_FOLDER=f"{out}/", KILL_SHIM_AT=str(at), KILL_SHIM_MODE=mode)
    status, _, errors = finished(process)
    said = complaints(errors)
    require(status in (0, 4), f"{mode} at {at}: status {status}: {errors[-300:]}")
    require(status == 0 or (said and str(out) in " ".join(said)), "no line that names the file:", errors[-300:])
    require(all("\n" not in line and len(line) < 600 for line in said), "more than a line:", said)
    # What the shim makes impossible is possible now.
    if not any(out.glob("step-????????")):
        shutil.rmtree(out, ignore_errors=True)
    require_whole_and_go_on(tools, out)
    return f"{mode} at call {at}: status {status}, {len(said)} lines"


def bad_disk_commands(tools, chance, out):
    name, mode, at = chance.choice(sorted(set(tools.commands) - {"probe"})), chance.choice(DISKS), chance.randint(1, 8)
    whole, _ = tools.reference_of(name)
    out.mkdir()
    words = placed(tools.commands[name][0], out)
    process = start(tools, words, LD_PRELOAD=tools.shims["kill_shim"], KILL_SHIM_FOLDER=f"{out}/", KILL_SHIM_AT=str(at),
                    KILL_SHIM_MODE=mode)
    status, _, errors = finished(process)
    said = complaints(errors)
    require(status in (0, 4), f"{name}, {mode} at {at}: status {status}: {errors[-300:]}")
    if status == 4:
        require(len(said) == 1 and f"{out}" in said[0], f"{name}, {mode} at {at}: not one line that names the file: {errors[-400:]}")
    require_parts_of(tools, name, out, whole, status)
    return f"{name}, {mode} at call {at}: status {status}"


def small_disk(tools, chance, out):
    kib = chance.choice([96, 192, 384, 768])
    out.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(out)], capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        return f"skipped: {mounted.stderr.strip()}"
    try:
        run = out / "run"
        status, _, errors = finished(start(tools, tools.train(run, "--set", "checkpoint_keep=0")))
        said = complaints(errors)
        require(status in (0, 4), f"{kib} KiB: status {status}: {errors[-300:]}")
        require(status == 0 or "No space left on device" in said[-1], errors[-300:])
        subprocess.run(["mount", "-o", "remount,size=64m", str(out)], check=True)
        if not any(run.glob("step-????????")):
            shutil.rmtree(run, ignore_errors=True)
        require_whole_and_go_on(tools, run)
    finally:
        subprocess.run(["umount", str(out)], check=False)
    return f"tmpfs of {kib} KiB: status {status}, {len(said)} lines"


def slow_disk(tools, chance, out):
    milliseconds = chance.choice([200, 400])
    shim = {"LD_PRELOAD": tools.shims["kill_shim"], "KILL_SHIM_FOLDER": f"{out}/step-", "KILL_SHIM_MODE": "slow",
            "KILL_SHIM_MS": str(milliseconds)}
    report = tools.root / f"{out.name}.json"
    few = ["--set", "checkpoint_every_steps=75"]
    if chance.random() < 0.5:
        status, _, errors = finished(start(tools, tools.train(out, "--json", report, *few), **shim))
        require(status == 0, f"status {status}: {errors[-300:]}")
        saves = json.loads(report.read_text())["checkpoints"]
        # Only the one before is waited for, and the last by nobody.
        for save in saves:
            stood = save["blocking_seconds"] - save["waiting_seconds"]
            require(stood < 0.1 + 0.1 * milliseconds / 1000, f"training stood still for {stood:.3f} s beside a slow disk")
        require(max(save["writing_seconds"] for save in saves) > milliseconds / 1000, "the disk was not slow", saves)
        what = "alone"
    else:
        status, _, errors = finished(start(tools, tools.train(out, *SUPERVISION, "--json", report, *few), **shim))
        require(status == 0, f"status {status}: {errors[-300:]}")
        require(json.loads(report.read_text())["failures"] == 0, "a slow disk was taken for a failure:", errors[-500:])
        what = "supervised"
    require(last_hashes(out) == tools.hashes, "the state at the end is another")
    return f"{milliseconds} ms more for each write and flush, {what}"


def clock_jumps(tools, chance, out, steady_too=False):
    jumps = ",".join(f"{chance.uniform(0, 1.0) * max(1, tools.seconds):.2f}:{chance.choice(CLOCKS)}" for _ in range(chance.randint(1, 3)))
    report = tools.root / f"{out.name}.json"
    killed_at = chance.randint(20, STEPS - 20)
    kill = ["--fault", f"kill@step={killed_at}"] if chance.random() < 0.7 else []
    shim = {"LD_PRELOAD": tools.shims["clock_shim"], "CLOCK_SHIM_JUMPS": jumps}
    if steady_too:
        shim.update(CLOCK_SHIM_JUMPS="0.3:36000,0.6:0", CLOCK_SHIM_STEADY="1")
    process = start(tools, tools.train(out, *SUPERVISION, "--deadline", "20", "--json", report, *kill), **shim)
    begin = time.monotonic()
    status, _, errors = finished(process)
    wall = time.monotonic() - begin
    require(status == 0, f"{jumps}: status {status}: {errors[-300:]}")
    told = json.loads(report.read_text())
    require(told["failures"] == len(kill) // 2, f"{jumps}: {told['failures']} failures: {errors[-500:]}")
    require(0 < told["useful_seconds"] <= told["wall_seconds"] <= wall + 0.5, f"{jumps}: times {told}, of {wall:.2f} s")
    for incident in told["incidents"]:
        if (begun := re.search(r"restart from step (\d+)", incident["action"])):
            require(told["lost_steps"] == killed_at - 1 - int(begun[1]), f"{jumps}: lost {told['lost_steps']} steps: {incident}")
    require(last_hashes(out) == tools.hashes, "the state at the end is another")
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    require(all(0 < step["step_seconds"] < 30 for step in steps if step["kind"] == "step"), f"{jumps}: times of steps")
    return f"{jumps}{' and ' + kill[1] if kill else ''}"


def clock_test_of_the_test(tools, chance, out):
    """A steady clock that jumps must be noticed by the checks above."""
    try:
        clock_jumps(tools, chance, out, steady_too=True)
    except Wrong:
        require_no_process(out, 10)
        return "noticed"
    raise Wrong("a steady clock that jumps was not noticed")


SCENARIOS = {"signals": signals, "supervised": supervised, "hung": hung, "interrupted_commands": interrupted_commands, "bad_disk": bad_disk,
             "bad_disk_commands": bad_disk_commands, "small_disk": small_disk, "slow_disk": slow_disk, "clock_jumps": clock_jumps}
TESTS_OF_THE_TEST = {"clock_test_of_the_test": clock_test_of_the_test}
QUICK = ["signals", "interrupted_commands", "bad_disk", "bad_disk_commands", "clock_jumps"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tandem", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=[*SCENARIOS, *TESTS_OF_THE_TEST])
    parser.add_argument("--quick", action="store_true", help="one round of the quick scenarios")
    parser.add_argument("--shims", type=pathlib.Path, help="folder with kill_shim.so and clock_shim.so; else they are compiled")
    options = parser.parse_args()
    names = options.only or (QUICK if options.quick else list(SCENARIOS))
    rounds = len(names) if options.quick else options.rounds
    root = pathlib.Path(tempfile.mkdtemp(prefix="tandem-adversity-"))
    tools = Tools(options.tandem, options.shims, root)
    failed = 0
    for number in range(rounds):
        seed = options.seed + number
        name = names[seed % len(names)]
        out = root / f"round-{seed}"
        begin = time.monotonic()
        try:
            text, verdict = {**SCENARIOS, **TESTS_OF_THE_TEST}[name](tools, random.Random(seed), out), "ok"
            shutil.rmtree(out, ignore_errors=True)
        except Wrong as wrong:
            text, verdict = f"{wrong} (kept: {out})", "WRONG"
            failed += 1
        print(f"{verdict:5} seed {seed:<4} {name}: {text} [{time.monotonic() - begin:.1f} s]", flush=True)
    print(f"adversity: {rounds} rounds, {failed} of them wrong")
    if not failed:
        shutil.rmtree(root)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
