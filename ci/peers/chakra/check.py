#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Decodes Chakra execution traces with protoc and checks what a simulator that reads them takes for granted.

    check.py [--schema et_def.proto] PREFIX                 PREFIX.RANK.et and PREFIX.groups.json
    check.py [--schema et_def.proto] --tandem path/to/tandem    writes such traces first (scale --chakra) and checks those

--schema: the published schema of MLCommons Chakra; without it execution_trace.proto beside this file, which has the same names and
numbers of what is written. Exit status: 0 all is well, 1 not, 77 protoc is not installed (the reason is printed).
"""
import argparse
import collections
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

SKIPPED = 77
HERE = pathlib.Path(__file__).resolve().parent
# Attributes of each type of node, with the field of the value that ASTRA-sim's feeders read.
ATTRIBUTES = {
    "COMP_NODE": {"is_cpu_op": "bool_val", "num_ops": "int64_val"},
    "COMM_COLL_NODE": {"is_cpu_op": "bool_val", "comm_type": "int64_val", "comm_size": "int64_val"},
    "COMM_SEND_NODE": {"is_cpu_op": "bool_val", "comm_size": "int64_val", "comm_src": "int32_val", "comm_dst": "int32_val",
                       "comm_tag": "int32_val"},
}
ATTRIBUTES["COMM_RECV_NODE"] = ATTRIBUTES["COMM_SEND_NODE"]
OPTIONAL = {"pg_name": "string_val", "root": "int32_val"}
COLLECTIVES = {0: "all_reduce", 2: "all_gather", 5: "broadcast", 6: "all_to_all", 7: "reduce_scatter"}
MIX = [  # arguments of tandem scale: what the traces are made of
    ["--gpus", "16", "--global-batch", "4", "--micro-batch", "1", "--set", "tensor=2", "--set", "pipeline=4", "--set",
     "overlap_gradients=true"],
    ["--gpus", "8", "--global-batch", "4", "--micro-batch", "1", "--set", "zero=3", "--set", "context=2"],
]


class Wrong(Exception):
    pass


def require(condition, text):
    if not condition:
        raise Wrong(text)


def messages(data, file):
    """The length-delimited messages of a file, each with the bytes of its length."""
    position = 0
    while position < len(data):
        begin, size, shift = position, 0, 0
        while True:
            require(position < len(data), f"{file}: cut off in a length")
            byte = data[position]
            size |= (byte & 0x7F) << shift
            position, shift = position + 1, shift + 7
            if byte < 0x80:
                break
        require(position + size <= len(data), f"{file}: cut off in a message")
        yield data[begin:position], data[position:position + size]
        position += size


class Decoder:
    def __init__(self, schema, folder):
        self.schema, self.folder = schema, folder
        (folder / "trace.proto").write_text(f'syntax = "proto3";\nimport "{schema.name}";\nmessage Trace {{ repeated '
                                            "ChakraProtoMsg.Node nodes = 1; }\n")

    def text(self, kind, proto, data):
        done = subprocess.run(["protoc", f"--decode={kind}", f"-I{self.folder}", f"-I{self.schema.parent}", proto], input=data,
                              capture_output=True, check=False)
        require(done.returncode == 0, f"protoc: {done.stderr.decode()}")
        return done.stdout.decode()

    def trace(self, file):
        parts = list(messages(file.read_bytes(), file))
        require(parts, f"{file}: empty")
        metadata = self.text("ChakraProtoMsg.GlobalMetadata", self.schema.name, parts[0][1])
        require('version: "0.0.4"' in metadata, f"{file}: metadata {metadata!r}")
        # A field of messages is each with its key and its length before it.
        return nodes_of(self.text("Trace", "trace.proto", b"".join(b"\x0a" + length + body for length, body in parts[1:])), file)


def nodes_of(text, file):
    nodes, attribute = [], None
    for line in map(str.strip, text.splitlines()):
        found = re.fullmatch(r"(\w+): (.*)", line)
        if line == "nodes {":
            nodes.append({"data_deps": [], "attr": {}})
        elif line == "attr {":
            attribute = {}
        elif line == "}":
            if attribute is not None:
                name = attribute.pop("name")
                nodes[-1]["attr"][name] = next(iter(attribute.items()))
            attribute = None
        else:
            require(found and not found[1].isdigit(), f"{file}: a field that the schema does not have: {line}")
            value = found[2].strip('"') if found[2].startswith('"') else int(found[2]) if found[2].isdigit() else found[2]
            if attribute is not None:
                attribute[found[1]] = value
            elif found[1] == "data_deps":
                nodes[-1]["data_deps"].append(value)
            else:
                nodes[-1][found[1]] = value
    return nodes


def check_nodes(file, nodes):
    known = set()
    for node in nodes:
        where = f"{file}: node {node.get('id')} ({node.get('name')})"
        require(node.get("id", 0) > 0 and node["id"] not in known, f"{where}: its id is there twice, or 0")
        require(node.get("type") in ATTRIBUTES, f"{where}: type {node.get('type')}")
        require(all(other in known for other in node["data_deps"]), f"{where}: names a node that does not come before it")
        known.add(node["id"])
        expected = ATTRIBUTES[node["type"]]
        for name, (field, _) in node["attr"].items():
            require(expected.get(name, OPTIONAL.get(name)) == field, f"{where}: {name} as {field}")
        require(expected.keys() <= node["attr"].keys(), f"{where}: lacks {expected.keys() - node['attr'].keys()}")
    require(any(node["type"] == "COMP_NODE" and node.get("duration_micros", 0) > 0 for node in nodes), f"{file}: nothing takes time")


def check_messages(traces):
    open_ends = collections.Counter()
    for rank, nodes in traces.items():
        for node in nodes:
            if node["type"] not in ("COMM_SEND_NODE", "COMM_RECV_NODE"):
                continue
            sends = node["type"] == "COMM_SEND_NODE"
            source, target, tag, size = (node["attr"][name][1] for name in ("comm_src", "comm_dst", "comm_tag", "comm_size"))
            require(rank == (source if sends else target), f"rank {rank}: a message from {source} to {target}")
            open_ends[source, target, tag, size] += 1 if sends else -1
    left = [message for message, count in open_ends.items() if count]
    require(not left, f"no send and receive of each other (from, to, tag, bytes): {left[:4]}")
    return len(open_ends)


def check_collectives(traces, groups):
    issued = collections.defaultdict(dict)
    for rank, nodes in traces.items():
        for node in nodes:
            if node["type"] != "COMM_COLL_NODE":
                continue
            group = node["attr"].get("pg_name", ("string_val", "0"))[1]
            members = groups.get(group, list(traces)) if group != "0" else list(traces)
            require(group == "0" or group in groups, f"rank {rank}: group {group} is not in the file of groups")
            require(rank in members, f"rank {rank}: is not in group {group}")
            kind = COLLECTIVES.get(node["attr"]["comm_type"][1])
            require(kind is not None, f"rank {rank}: comm_type {node['attr']['comm_type'][1]}")
            size = None if kind == "all_to_all" else node["attr"]["comm_size"][1]
            issued[group].setdefault(rank, []).append((kind, size))
    for group, by_rank in issued.items():
        members = list(traces) if group == "0" else groups[group]
        require(sorted(by_rank) == sorted(members), f"group {group}: ranks {sorted(by_rank)} of {members} take part")
        require(len({tuple(sequence) for sequence in by_rank.values()}) == 1, f"group {group}: ranks issue different collectives")
    return sum(len(sequence) for by_rank in issued.values() for sequence in by_rank.values())


def check(prefix, decoder):
    files = {}
    for file in prefix.parent.glob(prefix.name + ".*.et"):
        files[int(file.name[len(prefix.name) + 1:-3])] = file
    require(files and sorted(files) == list(range(len(files))), f"{prefix}: traces of ranks {sorted(files)}")
    traces = {}
    for rank, file in sorted(files.items()):
        traces[rank] = decoder.trace(file)
        check_nodes(file, traces[rank])
    groups = json.loads((prefix.parent / (prefix.name + ".groups.json")).read_text())
    found = check_messages(traces)
    collectives = check_collectives(traces, groups)
    print(f"{prefix.name}: {len(traces)} ranks, {sum(map(len, traces.values()))} nodes, {found} messages, {collectives} collective nodes, "
          f"{len(groups)} groups")


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("prefix", type=pathlib.Path, nargs="?")
    parser.add_argument("--tandem", type=pathlib.Path)
    parser.add_argument("--schema", type=pathlib.Path, default=HERE / "execution_trace.proto")
    arguments = parser.parse_args()
    if (arguments.prefix is None) == (arguments.tandem is None):
        parser.error("either PREFIX or --tandem")
    if shutil.which("protoc") is None:
        print("skipped: protoc is not installed (protobuf-compiler)")
        return SKIPPED
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        decoder = Decoder(arguments.schema.resolve(), folder)
        prefixes = [] if arguments.prefix is None else [arguments.prefix]
        for index, mix in enumerate(MIX if arguments.tandem else []):
            prefixes.append(folder / f"mix{index}")
            subprocess.run([arguments.tandem.resolve(), "scale", "--model", "gpt2-124m", "--cluster", "dgx-a100", *mix, "--chakra",
                            str(prefixes[-1])], check=True, stdout=subprocess.DEVNULL)
        try:
            for prefix in prefixes:
                check(prefix, decoder)
        except Wrong as error:
            print(error)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
