#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tokens a second of PyTorch's DataLoader over the memory-mapped tokens of a prepared data set.

    torch_data_loader.py --data PREFIX [--batching stream|padded] [--workers N] [--sequence T] [--rows N] [--dtype int32|int64] [--seconds S]

stream: a map-style dataset of samples of T + 1 tokens, cut by numpy out of the mapped .bin, shuffled, and put together by the default
collation: the way that training scripts do it. padded: the pieces of documents, padded to the longest by torch's pad_sequence.
Prints one line of JSON.
"""
import argparse
import json
import struct
import time

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset):
    def __init__(self, prefix, sequence, dtype):
        self.tokens = np.memmap(prefix + ".bin", dtype=np.uint16, mode="r")
        self.sequence = sequence
        self.dtype = dtype

    def __len__(self):
        return (len(self.tokens) - 1) // self.sequence

    def __getitem__(self, index):
        first = index * self.sequence
        row = torch.from_numpy(self.tokens[first : first + self.sequence + 1].astype(self.dtype))
        return row[:-1], row[1:]


class Pieces(Samples):
    def __init__(self, prefix, sequence, dtype):
        super().__init__(prefix, sequence, dtype)
        with open(prefix + ".idx", "rb") as file:
            file.seek(18)
            sequences = struct.unpack("<Q", file.read(8))[0]
            file.seek(34)
            sizes = np.frombuffer(file.read(4 * sequences), dtype=np.int32).astype(np.int64)
        begins = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        pieces = np.maximum(0, (sizes - 1 + sequence - 1) // sequence)
        document = np.repeat(np.arange(sequences), pieces)
        inside = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        self.first = begins[document] + inside * sequence
        self.pairs = np.minimum(sequence, sizes[document] - 1 - inside * sequence)

    def __len__(self):
        return len(self.first)

    def __getitem__(self, index):
        first = self.first[index]
        row = torch.from_numpy(self.tokens[first : first + self.pairs[index] + 1].astype(self.dtype))
        return row[:-1], row[1:]


def pad(rows):
    ids, targets = zip(*rows)
    return pad_sequence(ids, batch_first=True), pad_sequence(targets, batch_first=True, padding_value=-100)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--batching", choices=["stream", "padded"], default="stream")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--dtype", choices=["int32", "int64"], default="int64")
    parser.add_argument("--seconds", type=float, default=2)
    arguments = parser.parse_args()

    stream = arguments.batching == "stream"
    dataset = (Samples if stream else Pieces)(arguments.data, arguments.sequence, arguments.dtype)
    loader = DataLoader(dataset, batch_size=arguments.rows, shuffle=True, num_workers=arguments.workers, drop_last=True,
                        collate_fn=None if stream else pad, prefetch_factor=4 if arguments.workers else None)
    tokens = 0
    begin = cpu_begin = None
    seconds = 0.0
    for count, (ids, _) in enumerate(loader):
        if count == 20:  # workers have started
            begin, cpu_begin, tokens = time.perf_counter(), time.process_time(), 0
        tokens += ids.numel()
        if begin is not None:
            seconds = time.perf_counter() - begin
            if seconds > arguments.seconds:
                break
    print(json.dumps({"batching": arguments.batching, "workers": arguments.workers, "dtype": arguments.dtype,
                      "rows": arguments.rows, "sequence": arguments.sequence, "tokens_per_second": round(tokens / seconds),
                      "tokens_per_cpu_second": round(tokens / (time.process_time() - cpu_begin)),  # without those of the workers
                      "torch": torch.__version__}))


if __name__ == "__main__":
    main()
