#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes a result file fit for results/baselines: one line a case; of its properties the one nearest to its limit and those that fail,
without derivations (all are judged again by whoever runs it); no names of scratch folders. What `tandem compare` looks at stays.

    thin_result.py RESULT.json BASELINE.json
"""

import json
import re
import sys

MOST_BYTES = 2_000_000
SCRATCH = re.compile(r"/(?:tmp|var/tmp|dev/shm)/[\w.-]+")


def nearness(found):
    """0: far from the limit, or equal as demanded; towards 1: nearly failed."""
    value, limit = found["value"], found["limit"]
    if found["relation"] == "==" or not value or not limit:
        return 0.0
    return value / limit if found["relation"] == "<=" else limit / value


def thin(document):
    for case in document["cases"]:
        found = case["properties"]
        nearest = max((kept for kept in found if kept["holds"]), key=nearness, default=None)
        case["properties"] = [kept for kept in found if not kept["holds"] or kept is nearest]
        for kept in case["properties"]:
            if kept["holds"]:
                kept["derivation"] = ""
    return document


def to_text(document):
    def line(value):
        return SCRATCH.sub("SCRATCH", json.dumps(value, ensure_ascii=False, separators=(",", ":")))

    parts = []
    for key, value in document.items():
        if key == "cases":
            parts.append(f'"{key}":[\n' + ",\n".join(line(case) for case in value) + "\n]")
        else:
            parts.append(f'"{key}":{line(value)}')
    return "{" + ",\n".join(parts) + "}\n"


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__.strip())
    with open(sys.argv[1], encoding="utf-8") as file:
        document = json.load(file)
    if document["environment"]["git_dirty"] or document["environment"]["interrupted"]:
        print("note: of a tree with changes, or an interrupted run: not to be kept")
    text = to_text(thin(document))
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        file.write(text)
    print(f"{sys.argv[2]}: {len(document['cases'])} cases, {len(text.encode()) / 1e6:.2f} MB")
    if len(text.encode()) > MOST_BYTES:
        sys.exit("larger than 2 MB: record fewer suites")


if __name__ == "__main__":
    main()
