#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the performance targets that suites hold and prints them as a table: target, measured, ratio, state.

    performance_table.py [--out FILE] [--all] TANDEM

The rows of docs/performance.md that have no peer to install. Those with one: ci/peers/train_step.sh, collectives.sh and data_loader.sh.
A figure is that of a property in the result file; its target is the limit that the suite judges it by. A case that a busy machine makes
the suite skip is printed as not measured, with the reason. Ends with 1 where a target is missed, not where one is not measured.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

# Cases (or beginnings of their names), and what the names of the telling properties begin with.
TARGETS = [
    ("collectives/time", ("",)),
    ("overlap/hidden", ("",)),
    ("overlap/tensor/hidden", ("",)),
    ("recomputation/memory", ("",)),
    ("recomputation/time", ("",)),
    ("checkpoint/time", ("",)),
    ("recovery/detector", ("",)),
    ("recovery/time", ("",)),
    ("anomaly/bytes", ("",)),
    ("data_pipeline/prefetch", ("",)),
    ("scaling/published", ("median_absolute_error", "p90_absolute_error", "kendall", "model_state", "activation")),
    ("scaling/measured", ("step_error",)),
]


def measured_cases(tandem):
    """The cases of TARGETS with their results."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "result.json"
        command = [tandem, "run", "--full", "--without-peak", "--out", str(out), *(pattern for pattern, _ in TARGETS)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if not out.exists():
            raise SystemExit(f"performance_table: {' '.join(command)} ended with {run.returncode}\n{run.stderr}")
        return json.loads(out.read_text(encoding="utf-8"))["cases"]


def beginnings_for(case):
    return next(beginnings for pattern, beginnings in TARGETS if case == pattern or case.startswith(pattern + "/"))


def rows_of(case, with_exact):
    """A row for each property that is a measure; equalities are checks of something else, unless they are asked for."""
    name = case["case"]
    properties = [p for p in case.get("properties") or [] if p["name"].startswith(beginnings_for(name))]
    properties = [p for p in properties if with_exact or p["relation"] != "=="]
    if case["status"] == "skip":
        return [(name, "", "", "", "", f"not measured: {case['reason']}")]
    if not properties and case["status"] != "pass":
        return [(name, "", "", "", "", f"missed: {case['reason']}")]
    return [
        (name, p["name"], f"{p['relation']} {p['limit']:.4g}", f"{p['value']:.4g}",
         f"{p['value'] / p['limit']:.2f}" if p["limit"] else "", "met" if p["holds"] else "missed")
        for p in properties
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tandem", help="the program")
    parser.add_argument("--out", help="write the table to this file too (Markdown)")
    parser.add_argument("--all", action="store_true", help="properties that must be equal, too")
    arguments = parser.parse_args()
    rows = [row for case in measured_cases(arguments.tandem) for row in rows_of(case, arguments.all)]
    lines = ["| case | figure | target | measured | measured / target | state |", "| --- | --- | --- | --- | --- | --- |"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    missed = sum(row[-1].startswith("missed") for row in rows)
    unmeasured = sum(row[-1].startswith("not measured") for row in rows)
    text = "\n".join(lines) + f"\n\n{len(rows) - missed - unmeasured} met, {missed} missed, {unmeasured} not measured\n"
    print(text, end="")
    if arguments.out:
        pathlib.Path(arguments.out).write_text(text, encoding="utf-8")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
