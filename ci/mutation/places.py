# SPDX-License-Identifier: Apache-2.0
"""Where a C++ file can be mutated, and how: candidates found in clang's syntax tree.

A candidate replaces a range of the text by an expression or a statement that does what was there, unless its mutant is on."""

import bisect
import dataclasses
import re
import sys

sys.path.append("/usr/lib/python3/dist-packages")  # Debian's bindings, for a Python that is not Debian's

ON = "::tandem_mutation::on(@)"  # @ is the mutant's number

# How often each kind is drawn. What distributed training gets wrong comes first.
WEIGHTS = {
    "drop_factor": 12,
    "swap_ranks": 12,
    "off_by_one": 16,
    "stale_buffer": 10,
    "wrong_group": 9,
    "missing_wait": 8,
    "wrong_seed": 6,
    "boundary": 7,
    "negated_condition": 7,
    "plus_minus": 6,
    "dropped_statement": 6,
    "swapped_arguments": 4,
}

# A file without a match has no place of that kind: most are not parsed in vain.
HINTS = {
    "stale_buffer": re.compile(r"\b(copy|copy_n|copy_bytes|fill|fill_n|zero|memcpy|memset|write|read|assign|clear|store|load)\w*\("),
    "missing_wait": re.compile(r"\b(wait|wait_host|barrier|join|drain|synchronize|finish)\("),
    "wrong_group": re.compile(r"GroupAxis::|\bhere_?\.|(tensor|context|data|expert)_ranks?\b"),
    "wrong_seed": re.compile(r"seed|CounterRng|DropoutKey|\.step\b"),
    "swap_ranks": re.compile(r"rank|peer|root|owner|before\(|after\(|place|\bfrom\b|\bto\b"),
}

RANK_WORD = re.compile(r"^(?:[\w.]|->|\(\)|::)*\b(rank_?|peer_?|root|owner|place_?|source|destination|from|to|next|previous|left|right|"
                       r"members\.\w+\([^()]*\)|rank\(\)|place\(\)|owner\([^()]*\))$")
SEED_WORD = re.compile(r"^(?:[\w.]|->|\(\)|::)*\b(seed_?|step_?|step_index|stream|epoch|layer|micro_batch)$")
SEED_OWNER = re.compile(r"seed|rng|Rng|DropoutKey|dropout_key|shuffle|epoch|order|normal", re.IGNORECASE)
SLICE_CALL = re.compile(
    r"^(subspan|subview|rows|columns|slice|first|last|span|piece_begin|part|of|at|elements|flat|resize|balanced_part|interval|read|write|"
    r"copy\w*)$"
)
SLICE_NAME = re.compile(
    r"(begin|end|offset|first|last|count|size|rows|tokens|elements|stride|base|length|position|columns|width|bytes|index)_?$"
)
STALE_CALL = re.compile(r"^(copy|fill|zero|memcpy|memset|write|read|assign|clear|store|load|scatter|gather)\w*$")
WAIT_CALL = re.compile(r"^(wait\w*|barrier|join|drain|synchronize|finish|notify_all|notify_one)$")
QUIET_CALL = re.compile(
    r"(log|note|timeline|record|progress|flight|trace|metric|span|report|reserve|print|name|describe|check|require)", re.IGNORECASE
)
TEXT_FUNCTION = re.compile(r"^(describe|to_string|name|text|print|explain|parse|reason|message_of)\w*$|_text$|_name$")
AXES = ["tensor", "context", "data", "pipeline"]
GROUPS = ["world", "data", "tensor", "pipeline", "context", "expert", "gradient", "expert_gradient", "model"]


@dataclasses.dataclass(frozen=True, order=True)
class Candidate:
    begin: int  # byte offsets in the file
    end: int
    kind: str
    replacement: str


def masked_ranges(text):
    """What must not be touched: checks and other macros, preprocessor lines, texts for people, planted faults."""
    ranges = []
    for match in re.finditer(r"\b(?:TANDEM_\w+|static_assert|fmt::\w+|describe|to_string|InputError|ContractError|IoError)\s*\(", text):
        depth, i = 0, match.end() - 1
        while i < len(text):
            depth += {"(": 1, ")": -1}.get(text[i], 0)
            i += 1
            if depth == 0:
                break
        ranges.append((match.start(), i))
    ranges += [(m.start(), m.end()) for m in re.finditer(r"^[ \t]*#(?:[^\n\\]|\\\n|\\.)*", text, re.MULTILINE)]
    return ranges


class Finder:
    def __init__(self, path, text, unit, cindex):
        self.path, self.text, self.kinds = str(path), text, cindex.CursorKind
        self.types = cindex.TypeKind
        self.masked = sorted(masked_ranges(text))
        self.found = []
        self.integers = {getattr(self.types, name) for name in
                         ("INT", "LONG", "LONGLONG", "UINT", "ULONG", "ULONGLONG", "SHORT", "USHORT", "UCHAR", "SCHAR")}
        self.floats = {self.types.FLOAT, self.types.DOUBLE}
        for child in unit.cursor.get_children():
            self.visit(child, ())

    # ---- text

    def range(self, cursor):
        return cursor.extent.start.offset, cursor.extent.end.offset

    def of(self, cursor):
        begin, end = self.range(cursor)
        return self.text[begin:end]

    def is_masked(self, begin, end):
        return any(low < end and begin < high for low, high in self.masked)

    def add(self, kind, cursor, replacement, begin=None, end=None):
        low, high = self.range(cursor)
        begin, end = low if begin is None else begin, high if end is None else end
        if begin < end and not self.is_masked(begin, end) and "itfall" not in self.text[begin:end]:
            self.found.append(Candidate(begin, end, kind, replacement))

    def either(self, kind, cursor, mutant):
        self.add(kind, cursor, f"({ON} ? ({mutant}) : ({self.of(cursor)}))")

    def negated(self, cursor):
        """Both branches bool: what is bool by context alone, an optional, would be made of the other branch, and be there."""
        condition = self.of(cursor)
        self.add("negated_condition", cursor, f"({ON} ? !({condition}) : static_cast<bool>({condition}))")

    # ---- the tree

    def is_arithmetic(self, cursor):
        return cursor.type.get_canonical().kind in self.integers | self.floats

    def is_integer(self, cursor):
        return cursor.type.get_canonical().kind in self.integers

    def visit(self, cursor, above):
        k = self.kinds
        location = cursor.location
        if location.file is not None and location.file.name != self.path:
            return
        if cursor.kind in (k.FUNCTION_DECL, k.CXX_METHOD, k.FUNCTION_TEMPLATE):
            head = self.of(cursor).split("{")[0]
            result = cursor.result_type.spelling
            if "constexpr" in head or "string" in result or TEXT_FUNCTION.search(cursor.spelling):
                return
        if cursor.kind in (k.CXX_THROW_EXPR, k.STATIC_ASSERT, k.ENUM_DECL, k.TEMPLATE_TYPE_PARAMETER, k.TEMPLATE_NON_TYPE_PARAMETER):
            return
        if cursor.kind in (k.VAR_DECL, k.FIELD_DECL) and "constexpr" in self.of(cursor):
            return
        children = list(cursor.get_children())
        if cursor.kind in (k.IF_STMT, k.CONDITIONAL_OPERATOR) and children:
            is_if = cursor.kind == k.IF_STMT
            condition = self.text[self.range(cursor)[0] : self.range(children[-1])[0]] if is_if else self.of(children[0])
            if re.search(r"itfall|planted", condition):
                return
            if is_if and re.match(r"\{?\s*(throw\b|TANDEM_)", self.of(children[1]) if len(children) > 1 else ""):
                return
        if cursor.kind == k.CASE_STMT:  # not its label
            children = children[1:]
        inside = any(a.kind == k.COMPOUND_STMT for a in above) or cursor.kind == k.COMPOUND_STMT
        if inside or any(a.kind == k.CONSTRUCTOR for a in above):
            self.look_at(cursor, children, above)
        for child in children:
            if cursor.kind in (k.FUNCTION_DECL, k.CXX_METHOD, k.FUNCTION_TEMPLATE) and child.kind == k.PARM_DECL:
                continue
            self.visit(child, above + (cursor,))

    def look_at(self, cursor, children, above):
        k = self.kinds
        parent = above[-1] if above else None
        if parent is not None and parent.kind == k.COMPOUND_STMT or self.is_branch(cursor, parent):
            self.statement(cursor, children)
        if cursor.kind == k.BINARY_OPERATOR and len(children) == 2:
            self.binary(cursor, *children)
        if cursor.kind == k.IF_STMT and children:
            head = self.text[self.range(cursor)[0] : self.range(children[0])[0]]
            if children[0].kind not in (k.DECL_STMT, k.VAR_DECL) and ";" not in head and re.fullmatch(r"if\s*\(\s*", head):
                self.negated(children[0])
        if cursor.kind == k.CALL_EXPR:
            self.call(cursor)
        if cursor.kind == k.ARRAY_SUBSCRIPT_EXPR and len(children) == 2 and self.is_integer(children[1]):
            self.off_by_one(children[1])
        if cursor.kind == k.VAR_DECL and children and SLICE_NAME.search(cursor.spelling) and self.is_integer(children[-1]):
            if "=" in self.text[cursor.location.offset : self.range(children[-1])[0]]:
                self.off_by_one(children[-1])
        self.names(cursor, above)

    def is_branch(self, cursor, parent):
        """A statement alone, without braces, below if, else, for, while, case or range for."""
        if parent is None:
            return False
        k = self.kinds
        if parent.kind not in (k.IF_STMT, k.FOR_STMT, k.WHILE_STMT, k.CXX_FOR_RANGE_STMT, k.CASE_STMT, k.DEFAULT_STMT):
            return False
        end = self.range(cursor)[1]
        return self.text[end : end + 1] == ";" and not (parent.kind == k.FOR_STMT and ")" in self.text[end : end + 2])

    def statement(self, cursor, children):
        k = self.kinds
        begin, end = self.range(cursor)
        text = self.of(cursor)
        guarded = f"({ON} ? void() : static_cast<void>({text}))"  # an expression: no else goes astray
        if self.text[end : end + 1] != ";":
            return
        if cursor.kind == k.CALL_EXPR or cursor.kind == k.UNEXPOSED_EXPR:
            call = cursor if cursor.kind == k.CALL_EXPR else next((c for c in cursor.walk_preorder() if c.kind == k.CALL_EXPR), None)
            name = call.spelling if call is not None else ""
            waits = re.fullmatch(r"(.*\))\s*\.\s*wait_host\(\)", text, re.DOTALL)
            if waits:
                self.add("missing_wait", cursor, f"({ON} ? ::tandem_mutation::leave({waits.group(1)}) : static_cast<void>({text}))")
            elif WAIT_CALL.match(name):
                self.add("missing_wait", cursor, guarded)
            elif STALE_CALL.match(name):
                self.add("stale_buffer", cursor, guarded)
            elif not QUIET_CALL.search(text.split("(")[0]) and name:
                self.add("dropped_statement", cursor, guarded)
        elif cursor.kind in (k.BINARY_OPERATOR, k.COMPOUND_ASSIGNMENT_OPERATOR) and len(children) == 2:
            between = self.text[self.range(children[0])[1] : self.range(children[1])[0]].strip()
            if between in ("=", "+=", "-=", "|="):
                self.add("dropped_statement", cursor, guarded)
            if between in ("*=", "/="):
                self.add("drop_factor", cursor, guarded)
            if between in ("+=", "-="):
                other = "-=" if between == "+=" else "+="
                changed = f"{self.of(children[0])} {other} {self.of(children[1])}"
                self.add("plus_minus", cursor, f"({ON} ? static_cast<void>({changed}) : static_cast<void>({text}))")

    def binary(self, cursor, left, right):
        operator = self.text[self.range(left)[1] : self.range(right)[0]].strip()
        a, b = self.of(left), self.of(right)
        plain = self.is_arithmetic(left) and self.is_arithmetic(right)
        if operator in ("*", "/") and plain:
            kept = [a] if operator == "/" else [a, b]
            for text in kept:
                self.either("drop_factor", cursor, text)
        if operator in ("+", "-") and plain:
            self.either("plus_minus", cursor, f"({a}) {'-' if operator == '+' else '+'} ({b})")
        other = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}.get(operator)
        if other and plain:
            self.either("boundary", cursor, f"({a}) {other} ({b})")
            self.off_by_one(right)

    def off_by_one(self, cursor):
        text = self.of(cursor)
        if not self.is_integer(cursor):
            return
        for change in ("+ 1", "- 1"):
            if not (text == "0" and change == "- 1"):
                self.either("off_by_one", cursor, f"({text}) {change}")

    def call(self, cursor):
        name = cursor.spelling
        arguments = [a for a in cursor.get_arguments() if a is not None]
        if name.startswith("operator"):
            if name == "operator[]" and len(arguments) == 2:
                self.off_by_one(arguments[1])
            return
        if SLICE_CALL.match(name):
            for argument in arguments:
                self.off_by_one(argument)
        if name in ("before", "after") and len(arguments) == 1:
            text = self.of(cursor)
            other = "after" if name == "before" else "before"
            self.either("swap_ranks", cursor, re.sub(rf"\b{name}\(", other + "(", text, count=1))
        for first, second in zip(arguments, arguments[1:]):
            self.swap(first, second)

    def swap(self, first, second):
        a, b = self.of(first), self.of(second)
        same = first.type.get_canonical().spelling.replace("const ", "") == second.type.get_canonical().spelling.replace("const ", "")
        begin, end = self.range(first)[0], self.range(second)[1]
        between = self.text[self.range(first)[1] : self.range(second)[0]]
        if not same or a == b or not a or not b or between.strip() != "," or "{" in a + b:
            return
        self.add("swapped_arguments", first, f"({ON} ? ({b}) : ({a})), (::tandem_mutation::on(@) ? ({a}) : ({b}))", begin, end)

    def names(self, cursor, above):
        """Kinds that go by what an expression is called."""
        k = self.kinds
        text = self.of(cursor)
        if cursor.kind not in (k.DECL_REF_EXPR, k.MEMBER_REF_EXPR, k.CALL_EXPR) or len(text) > 60:
            return
        whole = [a for a in above if self.range(a) == self.range(cursor)]
        if any(a.kind in (k.MEMBER_REF_EXPR, k.CALL_EXPR) for a in whole):
            return
        above = above[: len(above) - len(whole)]  # conversions, which are not written
        parent = above[-1] if above else None
        if parent is not None and parent.kind in (k.UNARY_OPERATOR, k.MEMBER_REF_EXPR, k.CASE_STMT, k.COMPOUND_ASSIGNMENT_OPERATOR):
            return
        following = self.text[self.range(cursor)[1] :].lstrip()[:2]
        if re.match(r"=[^=]|\+\+|--|[-+*/|]=|\.|\(|->|\[", following):  # written to, or only the beginning of something
            return
        group = re.fullmatch(r"GroupAxis::(\w+)", text)
        if group and group.group(1) in GROUPS:
            for other in GROUPS:
                if other != group.group(1):
                    self.either("wrong_group", cursor, f"GroupAxis::{other}")
        axis = re.fullmatch(r"(.*\bhere_?\b(?:\(\))?\.|.*coordinates\([^()]*\)\.)(\w+)", text)
        if axis and axis.group(2) in AXES:
            for other in AXES:
                if other != axis.group(2):
                    self.either("wrong_group", cursor, axis.group(1) + other)
        local = re.fullmatch(r"(.*\blocal_?\.)(tensor|context|expert|data)_(ranks?)", text)
        if local:
            for other in ("tensor", "context", "expert", "data"):
                if other != local.group(2):
                    self.either("wrong_group", cursor, f"{local.group(1)}{other}_{local.group(3)}")
        if not self.is_integer(cursor):
            return
        if RANK_WORD.match(text):
            self.either("swap_ranks", cursor, f"::tandem_mutation::swapped({text})")
        owners = [self.of(a)[:200] for a in above[-3:] if a.kind in (k.CALL_EXPR, k.INIT_LIST_EXPR, k.VAR_DECL)]
        if SEED_WORD.match(text) and (text.endswith(("seed", "seed_")) or any(map(SEED_OWNER.search, owners))):
            self.either("wrong_seed", cursor, f"{text} + 1")


class Parser:
    """Reads files with clang; keeps what it read."""

    def __init__(self, root, flags):
        import clang.cindex as cindex

        for kinds in (cindex.CursorKind, cindex.TypeKind):  # the bindings do not know all that the library has
            for number in range(700):
                try:
                    kinds.from_id(number)
                except ValueError:
                    kinds(number)
        self.cindex, self.root, self.flags = cindex, root, flags
        self.index = cindex.Index.create()
        self.units = {}

    def unit(self, path):
        if path not in self.units:
            language = ["-x", "c++"]
            while len(self.units) >= 8:  # of a hundred megabytes each
                self.units.pop(next(iter(self.units)))
            self.units[path] = self.index.parse(str(self.root / path), args=language + self.flags)
        return self.units[path]

    def candidates(self, path):
        text = (self.root / path).read_text()
        if not text.isascii():  # clang counts bytes
            return []
        unit = self.unit(path)
        if any(d.severity >= self.cindex.Diagnostic.Error for d in unit.diagnostics):
            return []
        return sorted(set(Finder(self.root / path, text, unit, self.cindex).found))

    def compiles(self, path, text):
        unit = self.unit(path)
        unit.reparse(unsaved_files=[(str(self.root / path), text)])
        return not any(d.severity >= self.cindex.Diagnostic.Error for d in unit.diagnostics)


def line_of(text, offset):
    starts = [0] + [m.end() for m in re.finditer("\n", text)]
    return bisect.bisect_right(starts, offset)


def apply(text, mutations):
    """text with several mutations that do not overlap: (number, Candidate)."""
    for number, candidate in sorted(mutations, key=lambda pair: -pair[1].begin):
        text = text[: candidate.begin] + candidate.replacement.replace("@", str(number)) + text[candidate.end :]
    return text
