# SPDX-License-Identifier: Apache-2.0
"""For run_docs.py: commands and the output shown below them, found in Markdown and in help texts; what the program's help says of a
command; two outputs compared but for numbers. Nothing here runs a command of a document."""
import dataclasses
import functools
import json
import re
import shlex
import subprocess

# More than a second or two of CPU. Found in commands whose placeholders are filled in.
TAKES_LONG = [
    r"tandem run( --quick| --full|$)", r"tandem run .*--full", r"tandem run scaling$", r"mpirun .* tandem run data_parallel --quick",
    r"tandem claims", r"tandem pitfalls$", r"tandem probe ", r"build/[abr]\.json", r"tandem compose", r"--backend simt", r"gpt2-124m\.json",
    r"train docs/examples/(tiny_text|hybrid)\.json --data",
]


def takes_long(text):
    return any(re.search(pattern, text) for pattern in TAKES_LONG)


def words(text):
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        return text.split()


@dataclasses.dataclass
class Command:
    document: str
    line: int
    text: str
    comment: str = ""
    output: list = dataclasses.field(default_factory=list)
    run: bool = True  # False: named in a sentence only

    @property
    def refused(self):
        """What a command says that is meant to be refused."""
        found = re.match(r"refused: ([^;]*)", self.comment)
        return found[1].strip() if found else None

    @property
    def expected_status(self):
        if self.refused:
            return 2
        found = re.fullmatch(r"exit status (\d+).*", self.comment)
        # "0: agrees, 1: diverges" explains; "exit status 2" promises.
        return int(found[1]) if found and ":" not in self.comment else None


# ---- Markdown

SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
COMMENT = re.compile(r"\s+# (.*)$")
PROGRAM = re.compile(r"(\./)?(tandem|mpirun|torchrun|srun|python3|ci/[\w/.]+|build/[\w/.]+) ?")


def command_of(document, line, text):
    comment = COMMENT.search(text)
    return Command(document, line, COMMENT.sub("", text).strip(), comment[1] if comment else "")


def of_block(document, first_line, language, lines):
    """Commands of a fenced block whose first line has this number."""
    commands, joined, start = [], "", first_line
    shell = language in {"sh", "bash"}
    for number, line in enumerate(lines, first_line):
        if not joined and not (shell or line.startswith("$ ")):
            if commands:
                commands[-1].output.append(line)
            continue
        if not joined:
            start = number
        joined += line if shell or joined else line[2:]
        if joined.endswith("\\"):
            joined = joined[:-1] + " "
            continue
        if joined.strip() and not joined.lstrip().startswith("#"):
            commands.append(command_of(document, start, joined))
        joined = ""
    return commands


def of_table_row(document, number, line, column):
    """Code spans of the column "command" are run, others are only named."""
    cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
    for index, cell in enumerate(cells):
        for span in SPAN.findall(cell):
            span = span.replace("\\|", "|")
            if index == column and PROGRAM.match(span):
                yield command_of(document, number, span)
            elif span.startswith("tandem "):
                yield Command(document, number, span, run=False)


def of_document(document, text, outputs=()):
    """All commands; `outputs`: (document, how a block begins, command) of output that has no command above it."""
    commands, lines, number, column = [], text.splitlines(), 0, None
    while number < len(lines):
        line = lines[number]
        number += 1
        if fence := re.match(r"```(\w*)", line):
            end = next(i for i in range(number, len(lines)) if lines[i].startswith("```"))
            block = lines[number:end]
            commands += of_block(document, number + 1, fence[1], block)
            commands += [Command(document, number + 1, command, output=block) for where, begin, command in outputs
                         if where == document and block and block[0].startswith(begin)]
            number = end + 1
        elif line.startswith("|"):
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            if number < 2 or not lines[number - 2].startswith("|"):
                column = cells.index("command") if "command" in cells else None
            commands += of_table_row(document, number, line, column)
        else:
            commands += [Command(document, number, span, run=False) for span in SPAN.findall(line) if re.match(r"tandem [a-z]", span)]
            if re.match(r"    tandem [a-z]", line):
                commands.append(Command(document, number, line.strip(), run=False))
    return commands


# ---- help texts

class Help:
    """What the program says of itself."""

    def __init__(self, program):
        self.program = str(program)

    @functools.lru_cache(maxsize=None)
    def text(self, name):
        done = subprocess.run([self.program, *name.split(), "--help"], capture_output=True, text=True, check=False)
        return done.stdout if done.returncode == 0 else ""

    def subcommands(self, name):
        part = re.search(r"^Subcommands:\n((?:  .*\n)+)", self.text(name), re.MULTILINE)
        return re.findall(r"^  (\S+)", part[1], re.MULTILINE) if part else []

    @functools.lru_cache(maxsize=None)
    def commands(self):
        """Every command that does something: "run", "data prepare", ..."""
        def below(name):
            inner = self.subcommands(name)
            return [leaf for word in inner for leaf in below(f"{name} {word}".strip())] if inner else [name]
        return below("")

    @functools.lru_cache(maxsize=None)
    def names(self):
        """Whatever may be named on a command line."""
        done = subprocess.run([self.program, "list", "--json", "-"], capture_output=True, text=True, check=False)
        return json.loads(done.stdout)

    def faults(self, name):
        """Options without explanation, no example."""
        text = self.text(name)
        options = re.search(r"\n(?:Positionals|Options):\n.*?(?=\n\n(?!\w+:\n)|\Z)", text, re.DOTALL)
        lines = options[0].splitlines() if options else []
        for index, line in enumerate(lines):
            if re.match(r"  (-|[A-Z])", line) and not re.match(r"  \S.*\s{2,}\S", line) and (
                    index + 1 == len(lines) or not lines[index + 1].startswith(" " * 20)):
                yield f"no word about{line}"
        if not any(command.run for command in self.examples(name)):
            yield "no example"

    def examples(self, name):
        """Indented lines below "Example", and before them what they come after."""
        commands, below, document = [], False, f"tandem {name} --help"
        for number, line in enumerate(self.text(name).splitlines(), 1):
            if re.match(r"Examples?\b", line):
                below = True
                after = re.search(r"after: (.*)\):?$", line)
                commands += [Command(document, number, text) for text in re.split(r"[;,] (?=tandem)", after[1])] if after else []
            elif below and re.match(r"  \S", line) and PROGRAM.match(line.strip()):
                commands.append(command_of(document, number, line))
            elif below and not line.strip():
                below = False
        return commands

    def problems(self, text):
        """What a command line names that the program does not know."""
        found = re.search(r"\btandem ((?:[a-z]+ ?)+)(.*)", text)
        if not found:
            return
        head = found[1].split()
        if head[0] not in self.subcommands(""):
            yield f"there is no command {head[0]}"
            return
        name = head[0]
        if self.subcommands(name):
            if len(head) < 2:
                return  # "tandem data": the group of commands
            for word in head[1].split("|"):
                if word not in self.subcommands(name):
                    yield f"there is no command {name} {word}"
                    return
            name = f"{head[0]} {head[1]}"
        known = set(re.findall(r"--[a-z][\w-]*", self.text(name)))
        for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", found[0]):
            if option not in known:
                yield f"tandem {name} has no option {option}"
        yield from self.unknown_names(name, text)

    def unknown_names(self, name, text):
        names = self.names()
        for option, kind in (("--model", "models"), ("--cluster", "clusters"), ("--published", "published")):
            for word in re.findall(rf"{option} ([a-z][\w.-]*)", text):
                if word not in names[kind] and word != "all":
                    yield f"{option} {word}: tandem list has no such name"
        for key in re.findall(r"--set (\w+)=", text):
            if key != "key" and not re.search(rf"\.{key}\b", self.text("train")):
                yield f"--set {key}: there is no such key"
        if name == "run":
            cases = [case["case"] if isinstance(case, dict) else case for case in names["cases"]]
            for word in text.split("tandem run")[1].split():
                if word.startswith("-"):
                    break
                if re.fullmatch(r"[a-z][\w/.-]*", word) and not any(case.startswith(word) for case in cases):
                    yield f"no case begins with {word}"


# ---- output

NUMBER = re.compile(r"(?<![\w.])[-+]?\d(?:[\d,.]*\d)?(?:e[-+]?\d+)?[kMGT]?(?:\s*(?:%|(?:[KMGT]i?)?B(?:/s)?|[kMGT]?FLOP/s|[numk]?s|min|h)(?![\w]))?")
TENSOR = re.compile(r"\b(?:d\.)?(?:h\.\d+(?:\.[a-z_]\w*)*|w[tp]e(?:\.weight)?|ln_f(?:\.\w+)?)(?![\w/])")


def masked(line):
    """The first word as it stands, unless it is a number; behind it numbers with their units, and names of tensors, as one sign each."""
    first, _, rest = re.sub(r"\s+", " ", line.strip()).partition(" ")
    rest = NUMBER.sub("#", TENSOR.sub("T", rest))
    return " ".join(f"{NUMBER.sub('#', first)} {rest}".split())


def differences(shown, printed):
    """Where what a document shows is not what is printed. A line "..." stands for any number of lines."""
    shown = [masked(line) for line in shown if line.strip()]
    printed = [masked(line) for line in printed.splitlines() if line.strip()]
    position, gap = 0, False
    for line in shown:
        if line == "...":
            gap = True
            continue
        begin = position
        while gap and position < len(printed) and printed[position] != line:
            position += 1
        if position == len(printed) or printed[position] != line:
            now = printed[begin] if begin < len(printed) else "nothing more"
            yield f"shown:   {line}\n    printed: {now}"
            return
        position, gap = position + 1, False
    if position < len(printed) and not gap:
        yield f"printed, not shown: {printed[position]}"


# ---- for the self-test of run_docs.py

SMALL_DOCUMENT = """# Small
```
$ tandem list
name   items
one    12.5 MiB
two     3.0 KiB
2 things
```
```sh
tandem list --json -        # all of it
tandem list data_missing    # refused: no data_missing here; more text
cat data/file.txt > build/copy.txt && cat build/copy.txt
```
| you want | command |
| --- | --- |
| a list | `tandem list`, then `tandem list --json -` |

Said in a sentence: `tandem list --json FILE`, `tandem run suite/case --quick`.
"""
SMALL_PROGRAM = """#!/bin/sh
case "$*" in
  --help) printf 'Usage\\n\\nSubcommands:\\n  list  Lists\\n  run  Runs\\n' ;;
  "list --help") printf 'Lists\\n\\nOptions:\\n  --json TEXT   a file\\n\\nExample:\\n  tandem list\\n' ;;
  "run --help") printf 'Runs\\n\\nOptions:\\n  --quick   the quick ones\\n\\nExample:\\n  tandem run suite/case\\n' ;;
  "train --help") printf '' ;;
  "list --json -") echo '{"cases": ["suite/case"], "models": [], "clusters": [], "published": []}' ;;
  list) printf 'name   items\\none    99.5 GiB\\ntwo     1.0 KiB\\n2 things\\n' ;;
  "run suite/case") echo passed ;;
  *) echo "tandem: no data_missing here" >&2; exit 2 ;;
esac
"""


def write_small_tree(root):
    (root / "data").mkdir()
    (root / "data" / "file.txt").write_text("text\n", encoding="utf-8")
    (root / "tandem").write_text(SMALL_PROGRAM, encoding="utf-8")
    (root / "tandem").chmod(0o755)


def self_tests():
    """(fault, what is replaced, by what) in the small document or program."""
    return [
        ("none", "", ""),
        ("a wrong option", "tandem list --json - ", "tandem list --jsn - "),
        ("a vanished file", "data/file.txt", "data/gone.txt"),
        ("a wrong column", "name   items\none ", "name   things\none "),
        ("a missing row", "two     3.0 KiB\n", ""),
        ("a row too many", "2 things\n```", "2 things\nand more\n```"),
        ("another name in the first column", "one    12.5", "eins   12.5"),
        ("a text where a number is", "one    12.5 MiB", "one    plenty"),
        ("another refusal", "refused: no data_missing", "refused: no other"),
        ("accepted, not refused", "tandem list data_missing ", "tandem list "),
        ("a wrong command in a table", "`tandem list`, then", "`tandem lost`, then"),
        ("a wrong option in a sentence", "--json FILE", "--jason FILE"),
        ("an unknown case in a sentence", "run suite/case --quick", "run suit/case --quick"),
        ("an example that does not run", "Example:\\n  tandem run suite/case", "Example:\\n  tandem run suite/other"),
        ("a command without example", "\\n\\nExample:\\n  tandem run suite/case", ""),
        ("an option without a word", "--quick   the quick ones", "--quick"),
    ]
