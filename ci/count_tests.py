#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Counts the outcomes in JUnit reports of CTest and in the list of checks that ci/lib.sh writes.

    count_tests.py [--checks checks.tsv] report.xml...

Lists failed tests, then skipped ones by reason. The last line is "N passed, N failed, N skipped". Exit status 1 when something
failed, when a report is missing or empty (zero tests run is an error), else 0.
"""

import argparse
import collections
import os
import re
import sys
import xml.etree.ElementTree as ElementTree


def skip_reason(case):
    """GoogleTest prints "FILE:LINE: Skipped" and then the reason; CTest itself only says that it saw this."""
    output = case.findtext("system-out") or ""
    found = re.search(r": Skipped\s*\n(.*)", output)
    if found and found.group(1).strip():
        return found.group(1).strip()
    message = case.find("skipped")
    return (message.get("message") if message is not None else None) or "no reason given"


def outcomes_of_report(path):
    """(name, outcome, reason) of each test of a JUnit file."""
    folder = os.path.basename(os.path.dirname(path))
    try:
        cases = ElementTree.parse(path).getroot().findall(".//testcase")
    except (OSError, ElementTree.ParseError) as error:
        return [(f"{folder}: report", "failed", f"{path} cannot be read: {error}")]
    if not cases:
        return [(f"{folder}: report", "failed", f"{path} has no tests")]
    outcomes = []
    for case in cases:
        name = f"{folder}: {case.get('name')}"
        if case.find("skipped") is not None or case.get("status") in ("notrun", "disabled"):
            outcomes.append((name, "skipped", skip_reason(case)))
        elif case.find("failure") is not None or case.find("error") is not None or case.get("status") != "run":
            outcomes.append((name, "failed", ""))
        else:
            outcomes.append((name, "passed", ""))
    return outcomes


def outcomes_of_checks(path):
    with open(path, encoding="utf-8", errors="replace") as lines:
        # A failed ctest run is counted by its report, test by test.
        rows = [tuple(line.rstrip("\n").split("\t")) for line in lines]
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checks")
    parser.add_argument("reports", nargs="*")
    arguments = parser.parse_args()

    outcomes = outcomes_of_checks(arguments.checks) if arguments.checks else []
    for report in arguments.reports:
        outcomes += outcomes_of_report(report)

    count = collections.Counter(outcome for _, outcome, _ in outcomes)
    for name, outcome, reason in outcomes:
        if outcome == "failed":
            print(f"FAILED   {name}  {reason}".rstrip())
    by_reason = collections.defaultdict(list)
    for name, outcome, reason in outcomes:
        if outcome == "skipped":
            by_reason[reason].append(name)
    for reason, names in sorted(by_reason.items()):
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        print(f"skipped  {shown}: {reason}")
    print(f"{count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped")
    return 0 if outcomes and count["passed"] and not count["failed"] else 1


if __name__ == "__main__":
    sys.exit(main())
