# SPDX-License-Identifier: Apache-2.0
"""Draws mutations at random places of the optimized code, by seed: first the kind by its weight, then the file by its lines, then the
place. What does not compile, or overlaps an earlier one, is drawn again."""

import random
import re

from places import HINTS, WEIGHTS, apply, line_of

# Not the optimized halves, or not run by suites on the CPU with threads: reasons in docs/mutation.md.
OUT_OF_SCOPE = re.compile(
    r"_test\.cpp$|_bench\.cpp$|test_support|/nccl/|/mpi/|/adversary|without_|/probe/|/monitoring/|machine\.cpp$|measure_peaks|matmul_open|"
    r"flight|/s3_|scripted_store|sentencepiece|process_launcher|heartbeat_datagram|fault_effects|fault_injector|faulty_comm|"
    r"chakra|export_programs|planner_explain|published_read|progress_scope|incident_log|anomaly/bundle"
)


def scope(root):
    """[(path, lines of code)] of what may be mutated."""
    files = []
    for folder, patterns in (("optimized", ["*.cpp"]), ("kernels/cpu", ["*.cpp", "simd/*.h"])):
        for pattern in patterns:
            for path in sorted((root / folder).rglob(pattern)):
                relative = path.relative_to(root).as_posix()
                if OUT_OF_SCOPE.search(relative):
                    continue
                lines = [line for line in path.read_text().splitlines() if re.search(r"\w", line.split("//")[0])]
                files.append((relative, len(lines)))
    return files


def overlaps(candidate, others):
    return any(candidate.begin < other.end and other.begin < candidate.end for other in others)


def draw(parser, wanted, seed, only=None, rejected=(), say=lambda text: None):
    """[(number, path, Candidate)], numbered from 1. rejected: (path, begin, replacement) that another compiler has refused."""
    generator = random.Random(seed)
    files = [entry for entry in scope(parser.root) if only is None or re.search(only, entry[0])]
    texts = {path: (parser.root / path).read_text() for path, _ in files}
    found, chosen = {}, {}
    mutants, number = [], 0
    kinds, weights = list(WEIGHTS), list(WEIGHTS.values())
    while len(mutants) < wanted:
        kind = generator.choices(kinds, weights)[0]
        for _ in range(200):
            path = generator.choices([path for path, _ in files], [lines for _, lines in files])[0]
            if kind in HINTS and not HINTS[kind].search(texts[path]):
                continue
            if path not in found:
                found[path] = parser.candidates(path)
            places = sorted({(c.begin, c.end) for c in found[path] if c.kind == kind})
            if not places:
                continue
            place = generator.choice(places)
            variants = [c for c in found[path] if c.kind == kind and (c.begin, c.end) == place]
            candidate = generator.choice(variants)
            if (path, candidate.begin, candidate.replacement) in rejected or overlaps(candidate, chosen.get(path, [])):
                continue
            if not parser.compiles(path, apply(texts[path], [(1, candidate)])):
                continue
            number += 1
            chosen.setdefault(path, []).append(candidate)
            mutants.append((number, path, candidate))
            say(f"{number:4} {kind:18} {path}:{line_of(texts[path], candidate.begin)}")
            break
        else:
            raise SystemExit(f"mutation: no place of kind {kind} is left")
    return mutants
