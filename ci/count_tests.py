#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Counts the outcomes in JUnit reports of CTest and in the list of checks that ci/lib.sh writes.

    count_tests.py [--checks checks.tsv] report.xml...
    count_tests.py --self-test

An entry of CTest that runs many tests or cases, NAME_3_of_8, is counted by the program's own report, gtest/NAME_3_of_8.xml beside
CTest's; where that is missing, or does not say why the entry failed, the entry itself has failed.

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


SHARD = re.compile(r"_\d+_of_\d+$")


def outcomes_of_shard(path, outcome, reason):
    """(name, outcome, reason) of each test that a shard ran, by GoogleTest's own report."""
    try:
        cases = [case for case in ElementTree.parse(path).getroot().iter("testcase") if case.get("status", "run") == "run"]
    except (OSError, ElementTree.ParseError) as error:
        return [("", "failed", f"{reason} no report of its tests: {error}".strip())]
    found = []
    for case in cases:
        name = f"{case.get('classname')}.{case.get('name')}" if case.get("status") else f"case/{case.get('name')}"
        skipped, failure = case.find("skipped"), case.find("failure")
        if failure is None:
            failure = case.find("error")
        if failure is not None:
            found.append((name, "failed", "" if case.get("status") else failure.get("message", "")))
        elif skipped is not None:
            found.append((name, "skipped", (skipped.get("message") or "").strip().split("\n")[-1] or "no reason given"))
        else:
            found.append((name, "passed", ""))
    if outcome == "failed" and not any(result == "failed" for _, result, _ in found):
        found.append(("", "failed", reason or "the program failed, none of its tests did"))
    return found


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
        # GoogleTest's parameter comment may hold addresses: not part of the name.
        name = case.get("name").split("  # GetParam")[0]
        outcome, reason = outcome_of_case(case)
        if SHARD.search(name):
            shard = os.path.join(os.path.dirname(path), "gtest", f"{name}.xml")
            outcomes += [(f"{folder}: {test or name}", *rest) for test, *rest in outcomes_of_shard(shard, outcome, reason)]
        else:
            outcomes.append((f"{folder}: {name}", outcome, reason))
    return outcomes


def outcomes_of_checks(path):
    with open(path, encoding="utf-8", errors="replace") as lines:
        return [tuple(line.rstrip("\n").split("\t")) for line in lines]


def self_test_of_shards():
    """Four entries with two, one, no test and three cases in their reports; the second crashed after its test, the third wrote none."""
    entries = "".join(
        f'<testcase name="x_{i}_of_4" status="{status}"/>' for i, status in ((1, "run"), (2, "fail"), (3, "run"), (4, "fail"))
    )
    run = '<testcase name="{}" classname="T" status="run">{}</testcase>'
    shards = {
        "x_1_of_4": run.format("a", "") + run.format("b", '<skipped message="t.cpp:3&#x0A;needs 2 GPUs, found 0"/>'),
        "x_2_of_4": run.format("c", "") + '<testcase name="d" classname="T" status="notrun"/>',
        "x_4_of_4": '<testcase name="zero/a"/><testcase name="zero/b"><error message="nothing moved"/></testcase>'
        '<testcase name="zero/c"><skipped message="needs a GPU"/></testcase>',
    }
    with tempfile.TemporaryDirectory() as folder:
        os.mkdir(os.path.join(folder, "gtest"))
        for name, text in {os.path.join("gtest", key): value for key, value in shards.items()}.items():
            with open(os.path.join(folder, name + ".xml"), "w", encoding="utf-8") as file:
                file.write(f"<testsuites><testsuite>{text}</testsuite></testsuites>")
        with open(os.path.join(folder, "junit.xml"), "w", encoding="utf-8") as file:
            file.write(f"<testsuite>{entries}</testsuite>")
        found = [(name.split(": ")[1], outcome) for name, outcome, _ in outcomes_of_report(os.path.join(folder, "junit.xml"))]
    expected = [
        [("T.a", "passed"), ("T.b", "skipped")],
        [("T.c", "passed"), ("x_2_of_4", "failed")],
        [("x_3_of_4", "failed")],
        [("case/zero/a", "passed"), ("case/zero/b", "failed"), ("case/zero/c", "skipped")],
    ]
    wrong = sum(any(item not in found for item in part) for part in expected)
    if wrong or len(found) != 8:
        print(f"self-test: shards gave {found}")
    return wrong


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
    wrong += self_test_of_shards()
    print(f"self-test: {len(cases) + 5 - wrong} of {len(cases) + 5} right")
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
