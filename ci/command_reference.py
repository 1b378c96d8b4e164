#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes docs/commands.md, manual pages and bash completion from what the program's --help says.

    command_reference.py --program build/cpu/tandem                 writes docs/commands.md
    command_reference.py --program build/cpu/tandem --check         exit status 1: docs/commands.md is another
    command_reference.py --program TANDEM --man FOLDER --completion FILE
    command_reference.py --self-test
"""

import argparse
import dataclasses
import difflib
import os
import pathlib
import re
import subprocess
import sys

DOCUMENT = pathlib.Path(__file__).resolve().parent.parent / "docs" / "commands.md"
LISTS = {"Positionals", "Options", "Subcommands"}  # of CLI11; others with entries that begin with a dash are groups of options


@dataclasses.dataclass
class Command:
    name: str  # "tandem data prepare"
    summary: str = ""
    usage: str = ""
    lists: dict = dataclasses.field(default_factory=dict)  # title -> [(entry, text)]
    notes: list = dataclasses.field(default_factory=list)  # [(title, [line])], as they stand: examples, keys, faults

    def entries(self, title):
        return self.lists.get(title, [])


def entry_of(line):
    """("--seed UINT=1", "of parameters") of "  --seed UINT=1   of parameters"; the text may begin on the next line."""
    match = re.match(r"^  (\S.*?)(?:\s{2,}(\S.*))?$", line)
    # An entry that reaches the column of the texts has one space before its own.
    if match and not match.group(2) and len(line) > 31 and line[29] == " ":
        return line[2:29].strip(), line[30:].strip()
    return (match.group(1), match.group(2) or "") if match else None


def parse(name, text):
    command = Command(name)
    blocks = []  # [title, lines]
    for line in text.splitlines():
        if line.startswith("Usage: "):
            command.usage = re.sub(r"^Usage: \S+", "tandem", line)
        elif not command.usage:
            command.summary = line.strip().removeprefix("tandem: ") or command.summary
        elif line and not line[0].isspace():
            blocks.append([line.rstrip(), []])
        elif blocks:
            blocks[-1][1].append(line.rstrip())
    for title, lines in blocks:
        while lines and not lines[-1]:
            lines.pop()
        plain = title.rstrip(":")
        if plain not in LISTS and not (lines and lines[0].startswith("  -")):
            command.notes.append((plain, lines))
            continue
        entries = command.lists.setdefault(plain, [])
        for line in filter(None, lines):
            if line.startswith(" " * 10) and entries:
                entries[-1] = (entries[-1][0], (entries[-1][1] + " " + line.strip()).strip())
            elif entry := entry_of(line):
                entries.append(entry)
    return command


def help_of(program, words):
    run = subprocess.run([program, *words, "--help"], capture_output=True, text=True, check=True)
    # The number of cores is this machine's.
    return run.stdout.replace(f"[1 - 1024]={os.cpu_count()}\n", "[1 - 1024]=CORES\n")


def commands_of(program, words=()):
    command = parse(" ".join(["tandem", *words]), help_of(program, words))
    commands = [command]
    for name, _ in command.entries("Subcommands"):
        commands += commands_of(program, (*words, name))
    return commands


def code(text):
    return f"`{text}`"


def cell(text):
    return text.replace("|", "\\|")


def markdown(commands):
    lines = ["# Commands", "", "What `--help` says of every command, made by `ci/command_reference.py`; edit `cli/`, not this file.",
             "Exit status: 0 good, 1 a check failed, 2 the command or its input is wrong, 3 undecided, 4 the run broke, 130 interrupted and",
             "saved.", ""]
    for command in commands:
        lines += [f"## {command.name}", "", command.summary + ".", "", "```", command.usage, "```", ""]
        for title, entries in command.lists.items():
            shown = [(entry, text) for entry, text in entries if not entry.startswith("-h,")]
            if not shown:
                continue
            lines += [f"| {title.lower()} | |", "|---|---|"]
            lines += [f"| {code(cell(entry))} | {cell(text)} |" for entry, text in shown]
            lines.append("")
        for title, note in command.notes:
            lines += [title + ":" if note else title, ""]
            if note:
                # Not marked as a shell's: what an example needs beforehand need not be here.
                lines += ["```", *[line[2:] if line.startswith("  ") else line for line in note], "```", ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def roff(text):
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return "\\&" + text if text.startswith((".", "'")) else text


def manual_page(command, version):
    page = command.name.replace(" ", "-")
    lines = [f'.TH "{page.upper()}" 1 "" "{version}" "tandem"', ".SH NAME", f"{roff(page)} \\- {roff(command.summary)}",
             ".SH SYNOPSIS", roff(command.usage)]
    for title, entries in command.lists.items():
        lines.append(f".SH {title.upper()}")
        for entry, text in entries:
            lines += [".TP", f".B {roff(entry)}", roff(text or " ")]
    for title, note in command.notes:
        lines += [f'.SH "{roff(title.upper())}"', ".nf", *[roff(line) for line in note], ".fi"]
    children = [f"{page}-{name}" for name, _ in command.entries("Subcommands")]
    if children:
        lines += [".SH SEE ALSO", ", ".join(f".BR {roff(child)} (1)"[4:] for child in children)]
    return "\n".join(lines) + "\n"


def option_names(command):
    names = []
    for title, entries in command.lists.items():
        if title not in {"Positionals", "Subcommands"}:
            names += [word for entry, _ in entries for word in re.findall(r"--[\w-]+", entry.split(" ")[0])]
    return names


def completion(commands):
    """Words that may follow, by the command that stands there so far; file names besides."""
    cases = []
    for command in commands:
        words = [name for name, _ in command.entries("Subcommands")] + option_names(command)
        cases.append(f'    "{command.name}") words="{" ".join(words)}" ;;')
    known = " | ".join(f'"{command.name}"' for command in commands if " " in command.name)
    return "\n".join(["# SPDX-License-Identifier: Apache-2.0", "# bash completion of tandem", "_tandem() {",
                      '  local command=tandem words="" word',
                      '  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do', '    case "$command $word" in',
                      f'      {known}) command="$command $word" ;;', "    esac", "  done", '  case "$command" in', *cases, "  esac",
                      '  mapfile -t COMPREPLY < <(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}")', "}",
                      "complete -o default -F _tandem tandem", ""])


def self_test():
    text = ("Does things\nUsage: /a/b/tandem do [OPTIONS]\n\nOptions:\n  -h,--help                   Print this\n"
            "  --long TEXT:INT in [1 - 1024]=3\n                              of both | either\n"
            "  --restore-seconds FLOAT=300 that it takes\n\n\nRecovery:\n"
            "  --min-ranks INT=1           of it\n\nExample:\n  tandem do --long 2\n")
    command = parse("tandem do", text)
    assert command.summary == "Does things" and command.usage == "tandem do [OPTIONS]", command
    assert command.entries("Options")[1] == ("--long TEXT:INT in [1 - 1024]=3", "of both | either"), command
    assert command.entries("Options")[2] == ("--restore-seconds FLOAT=300", "that it takes"), command
    assert command.entries("Recovery") == [("--min-ranks INT=1", "of it")], command
    assert command.notes == [("Example", ["  tandem do --long 2"])], command
    assert "of both \\| either" in markdown([command]) and "```\ntandem do --long 2\n```" in markdown([command])
    assert ".B \\-\\-min\\-ranks INT=1" in manual_page(command, "tandem 1")
    assert option_names(command) == ["--help", "--long", "--restore-seconds", "--min-ranks"], option_names(command)
    print("self-test passed")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", help="the tandem that is asked")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--man", type=pathlib.Path)
    parser.add_argument("--completion", type=pathlib.Path)
    parser.add_argument("--self-test", action="store_true")
    arguments = parser.parse_args()
    if arguments.self_test:
        return self_test()
    if not arguments.program:
        parser.error("--program is missing")
    commands = commands_of(arguments.program)
    if arguments.man:
        run = subprocess.run([arguments.program, "--version"], capture_output=True, text=True, check=True)
        version = " ".join(run.stdout.split()[:2])
        arguments.man.mkdir(parents=True, exist_ok=True)
        for command in commands:
            page = arguments.man / (command.name.replace(" ", "-") + ".1")
            page.write_text(manual_page(command, version), encoding="utf-8")
    if arguments.completion:
        arguments.completion.parent.mkdir(parents=True, exist_ok=True)
        arguments.completion.write_text(completion(commands), encoding="utf-8")
    if arguments.man or arguments.completion:
        return 0
    made = markdown(commands)
    if not arguments.check:
        DOCUMENT.write_text(made, encoding="utf-8")
        print(f"{DOCUMENT.relative_to(DOCUMENT.parent.parent)}: {len(commands)} commands")
        return 0
    there = DOCUMENT.read_text(encoding="utf-8") if DOCUMENT.exists() else ""
    changes = list(difflib.unified_diff(there.splitlines(), made.splitlines(), "docs/commands.md", "--help", lineterm="", n=0))
    print("\n".join(changes[:40]) if changes else f"docs/commands.md is what {len(commands)} commands say")
    if changes:
        print("docs/commands.md is not what the commands say; make it again: ci/command_reference.py --program", arguments.program)
    return 1 if changes else 0


if __name__ == "__main__":
    sys.exit(main())
