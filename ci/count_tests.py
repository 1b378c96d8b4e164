#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Counts the outcomes in JUnit reports of CTest and in the list of checks that ci/lib.sh writes.

    count_tests.py [--checks checks.tsv] report.xml...
    count_tests.py --self-test

Lists failed tests, then skipped ones by reason. The last line is "N passed, N failed, N skipped". Exit status 1 when something
failed, when a report is missing or empty (zero tests run is an error), else 0.
"""

import argparse
import collections
import os
import re
import sys
import tempfile
import xml.etree.ElementTree as ElementTree


def skip_reason(case):
    """GoogleTest prints "FILE:LINE: Skipped" and then the reason; CTest itself only says that it saw this."""
    output = case.findtext("system-out") or ""
    found = re.search(r": Skipped\s*\n(.*)", output)
    if found and found.group(1).strip():
        return found.group(1).strip()
    message = case.find("skipped")
    return (message.get("message") if message is not None else None) or "no reason given"


def outcome_of_case(case):
    """CTest calls a test that it could not start "notrun", like one that skipped itself: only the message tells them apart."""
    message = case.find("skipped")
    text = message.get("message", "") if message is not None else ""
    if case.get("status") == "disabled" or text.startswith("SKIP_"):
        return "skipped", skip_reason(case)
    if case.get("status") == "run" and message is None and case.find("failure") is None and case.find("error") is None:
        return "passed", ""
    return "failed", text


def outcomes_of_report(path):
    """(name, outcome, reason) of each test of a JUnit file."""
    folder = os.path.basename(os.path.dirname(path))
    try:
        cases = ElementTree.parse(path).getroot().findall(".//testcase")
    except (OSError, ElementTree.ParseError) as error:
        return [(f"{folder}: report", "failed", f"{path} cannot be read: {error}")]
    if not cases:
        return [(f"{folder}: report", "failed", f"{path} has no tests")]
    # GoogleTest's parameter comment may hold addresses: not part of the name.
    return [(f"{folder}: {case.get('name').split('  # GetParam')[0]}", *outcome_of_case(case)) for case in cases]


def outcomes_of_checks(path):
    with open(path, encoding="utf-8", errors="replace") as lines:
        return [tuple(line.rstrip("\n").split("\t")) for line in lines]


def self_test():
    """A report with each kind of test, as CTest writes them."""
    cases = {
        '<testcase name="a" status="run"/>': "passed",
        '<testcase name="b" status="fail"><failure message=""/></testcase>': "failed",
        '<testcase name="c" status="notrun"><skipped message="Unable to find executable"/></testcase>': "failed",
        '<testcase name="d" status="notrun"><skipped message="SKIP_REGULAR_EXPRESSION_MATCHED"/>'
        "<system-out>x_test.cpp:7: Skipped\nneeds 2 GPUs, found 0\n</system-out></testcase>": "skipped",
        '<testcase name="e" status="disabled"/>': "skipped",
    }
    wrong = 0
    for text, expected in cases.items():
        found = outcome_of_case(ElementTree.fromstring(text))
        if found[0] != expected or (expected == "skipped" and "GPUs" in text and found[1] != "needs 2 GPUs, found 0"):
            print(f"self-test: {text} gave {found}")
            wrong += 1
    for empty in ("<testsuite/>", ""):
        with tempfile.NamedTemporaryFile("w", suffix=".xml") as report:
            report.write(empty)
            report.flush()
            wrong += 0 if outcomes_of_report(report.name)[0][1] == "failed" else 1
    print(f"self-test: {len(cases) + 2 - wrong} of {len(cases) + 2} right")
    return 1 if wrong else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checks")
    parser.add_argument("--self-test", action="store_true")
    parser.add_argument("reports", nargs="*")
    arguments = parser.parse_args()
    if arguments.self_test:
        return self_test()

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
