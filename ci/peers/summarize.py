#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Reads the JSON lines of step measurements and prints what they say.

    summarize.py --best-variant variants.jsonl                     the variant with the most tokens per second
    summarize.py --ours ours.jsonl --peer best.jsonl variants.jsonl   the ratio by rounds, and a Markdown table
"""

import argparse
import json
import statistics
import sys


def read_lines(path):
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip().startswith("{")]


def rates(measured):
    return [entry["tokens_per_second"] for entry in measured if "tokens_per_second" in entry]


def median_row(name, measured):
    values = rates(measured)
    return f"| {name} | {statistics.median(values):.0f} | {min(values):.0f} to {max(values):.0f} | {len(values)} |"


def best_variant(measured):
    usable = [entry for entry in measured if "tokens_per_second" in entry]
    if not usable:
        raise SystemExit(f"no variant ran: {measured}")
    return max(usable, key=lambda entry: entry["tokens_per_second"])["variant"]


def print_table(ours, peer, variants):
    first = peer[0]
    where = first.get("device") or f"{first['threads']} threads"
    shape = f"batch {first['batch']}, sequence {first['sequence']}, {where}, {first['precision']}"
    print(f"| training step of {first['parameters'] / 1e6:.0f}M parameters, {shape} | tokens/s, median | range | rounds |")
    print("| --- | --- | --- | --- |")
    print(median_row("tandem", ours))
    print(median_row(f"PyTorch {first['version']}, {first['variant']}, in turns with ours", peer))
    for entry in variants:
        if "error" in entry:
            print(f"| PyTorch, {entry['variant']} | {entry['error'].replace('|', '/')} | | |")
        else:
            malloc = f", {entry['malloc']} malloc" if "malloc" in entry else ""
            print(median_row(f"PyTorch {entry['version']}, {entry['variant']}{malloc}", [entry]))
    by_round = [a / b for a, b in zip(rates(ours), rates(peer))]
    print(f"\nratio ours / PyTorch: {statistics.median(by_round):.2f} (by round: {', '.join(f'{r:.2f}' for r in by_round)})")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--best-variant", action="store_true")
    parser.add_argument("--ours")
    parser.add_argument("--peer")
    parser.add_argument("variants")
    arguments = parser.parse_args()
    variants = read_lines(arguments.variants)
    if arguments.best_variant:
        print(best_variant(variants))
        return 0
    ours, peer = read_lines(arguments.ours), read_lines(arguments.peer)
    if not rates(ours) or not rates(peer):
        raise SystemExit("nothing was measured on one of the sides")
    print_table(ours, peer, variants)
    return 0


if __name__ == "__main__":
    sys.exit(main())
