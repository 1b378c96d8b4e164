# SPDX-License-Identifier: Apache-2.0
"""For ci/adversity.py: the program, what it does when nobody disturbs it, and what must hold when somebody has."""
import contextlib
import hashlib
import json
import os
import pathlib
import signal
import subprocess
import time

SOURCE = pathlib.Path(__file__).resolve().parent.parent / "cli"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
STEPS = 150
SETTINGS = ["layers=1", "hidden=32", "heads=2", "vocabulary=32", "sequence=32", "rows=8", "data=2", "residual_dropout=0.1",
            "checkpoint_every_steps=10", "checkpoint_keep=3", "evaluate_every_steps=0", "evaluate_batches=1", "loader_threads=1"]
SUPERVISION = ["--supervise", "--heartbeat-seconds", "0.3", "--backoff-seconds", "0.05", "--stall-seconds", "20", "--folder-seconds", "1"]


class Wrong(Exception):
    """What must hold does not."""


def require(condition, *what):
    if not condition:
        raise Wrong(" ".join(str(one) for one in what))


class Tools:
    """The program, the shims, and what is the same for all rounds."""

    def __init__(self, tandem, shims, root):
        self.tandem, self.root = str(tandem.resolve()), root
        self.shims = {}
        for name in ("kill_shim", "clock_shim"):
            made = (shims or root) / f"{name}.so"
            if not shims:
                subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(made), str(SOURCE / f"{name}.c"), "-ldl"], check=True)
            self.shims[name] = str(made.resolve())
        self.undisturbed = root / "undisturbed"
        begin = time.monotonic()
        self.must(self.train(self.undisturbed))
        self.seconds = time.monotonic() - begin
        self.hashes = last_hashes(self.undisturbed)
        self.commands, self.command_seconds = {}, {}
        self.make_inputs()

    def make_inputs(self):
        text, inputs = self.root / "text.txt", self.root / "inputs"
        text.write_text("\n".join(f"line {i} says {i * i}" for i in range(60000)))
        inputs.mkdir()
        run = ["run", "data_parallel/ranks2/accum1/fp32", "--repetitions", "2", "--without-peak"]
        self.must([*run, "--out", inputs / "result.json"])
        self.must(["checkpoint", "export", self.undisturbed, "--out", inputs / "exported"])
        result = inputs / "result.json"
        # Command, and whether its files are the same each time.
        self.commands = {
            "prepare": (["data", "prepare", "--input", text, "--threads", "1", "--out", "OUT/data"], True),
            "export": (["checkpoint", "export", self.undisturbed, "--out", "OUT/exported"], True),
            "import": (["checkpoint", "import", inputs / "exported", "--out", "OUT/imported"], True),
            "reshard": (["checkpoint", "reshard", self.undisturbed, "--set", "data=1", "--out", "OUT/resharded"], True),
            "report": (["report", result, "--html", "OUT/report.html"], True),
            "compare": (["compare", result, result, "--json", "OUT/compared.json"], True),
            "run": ([*run, "--out", "OUT/result.json"], False),
            "probe": (["probe", "--ranks", "2", "--out", "OUT/cluster.json"], False),
        }

    def line(self, words):
        return [self.tandem, *map(str, words)]

    def must(self, words):
        done = subprocess.run(self.line(words), env=ENVIRONMENT, capture_output=True, text=True, check=False)
        require(done.returncode == 0, f"undisturbed {words[:3]}: {done.stderr[-300:]}")

    @staticmethod
    def train(out, *more):
        words = ["train", "--steps", STEPS, "--out", out, *more]
        for setting in SETTINGS:
            words += ["--set", setting]
        return words

    def reference_of(self, name):
        """Files of the command that nobody disturbs, and how long it takes; no files where the machine is too busy for it."""
        if name not in self.command_seconds:
            out = self.root / f"whole-{name}"
            out.mkdir(exist_ok=True)
            begin = time.monotonic()
            try:
                self.must(placed(self.commands[name][0], out))
            except Wrong as wrong:
                if "too busy" in str(wrong):
                    return None, 0
                raise
            self.command_seconds[name] = time.monotonic() - begin
        return contents(self.root / f"whole-{name}"), self.command_seconds[name]


def last_hashes(folder):
    manifest = json.loads((folder / f"step-{STEPS:08}" / "manifest.json").read_text())
    return {entry["name"]: entry["xxh128"] for entry in manifest["files"]}


def placed(words, out):
    return [str(word).replace("OUT/", f"{out}/") for word in words]


def contents(folder):
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
            for file in sorted(folder.rglob("*")) if file.is_file()}


def litter(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*")
                  if path.name.endswith((".tmp", ".unfinished", ".replaced", ".fetching")))


def processes_of(folder):
    found = {}
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if str(folder) in words and int(entry.name) != os.getpid():
                found[int(entry.name)] = words
    return found


def require_no_process(folder, seconds=0.0):
    end = time.monotonic() + seconds
    while processes_of(folder) and time.monotonic() < end:
        time.sleep(0.05)
    left = processes_of(folder)
    for pid in left:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    require(not left, "processes left behind:", left)


def complaints(text):
    return [line for line in text.splitlines() if line.startswith("tandem: ")]


def start(tools, words, launcher=(), **variables):
    return subprocess.Popen([*launcher, *tools.line(words)], env={**ENVIRONMENT, **variables}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, start_new_session=True)


def finished(process, seconds=120):
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired as late:
        process.kill()
        process.communicate()
        raise Wrong(f"does not end within {seconds} s") from late
    return process.returncode, output, errors


def require_whole_and_go_on(tools, out, supervised=()):
    """What is there is whole, and the same command, or --resume, ends as the undisturbed run did."""
    has_one = any(out.glob("step-????????"))
    if has_one:
        status, output, errors = finished(start(tools, ["checkpoint", "verify", out]))
        require(status == 0, "verify:", output[-300:], errors[-300:])
    words = tools.train(out, *supervised)
    if not supervised and has_one:
        words = ["train", "--resume", out, "--steps", STEPS]
    status, _, errors = finished(start(tools, words))
    require(status == 0, "going on:", status, errors[-300:])
    require(last_hashes(out) == tools.hashes, "the state at the end is another")
    require(not litter(out), "left over:", litter(out))


def send(process, name):
    if process.poll() is not None:
        return
    if name == "SIGSTOP":
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.3)
        name = "SIGCONT"
    process.send_signal(getattr(signal, name))
