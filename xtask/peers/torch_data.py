"""Pipelines of torch's DataLoader over the files of `cargo xtask bench input`, one JSON line for each.

Usage: torch_data.py FOLDER
"""

import csv
import glob
import json
import os
import random
import sys
import time

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

# Lines are read alone, so batches of them save calls only; tf_data.py has as many.
LINES, BATCH, BUFFER = 1024, 64, 10_000


def files(suffix):
    return sorted(glob.glob(os.path.join(sys.argv[1], "*" + suffix)))


def own(paths):
    worker = get_worker_info()
    return paths if worker is None else paths[worker.id :: worker.num_workers]


def shuffled(items):
    buffer = []
    for item in items:
        if len(buffer) < BUFFER:
            buffer.append(item)
            continue
        at = random.randrange(BUFFER)
        buffer[at], item = item, buffer[at]
        yield item
    random.shuffle(buffer)
    yield from buffer


class Lines(IterableDataset):
    def __iter__(self):
        for path in own(files(".csv")):
            with open(path) as file:
                next(file)
                yield from file


class Rows(IterableDataset):
    def rows(self):
        for path in own(files(".csv")):
            with open(path, newline="") as file:
                reader = csv.reader(file)
                next(reader)
                for row in reader:
                    yield torch.tensor([float(value) for value in row])

    def __iter__(self):
        return shuffled(self.rows())


def count(loader):
    return sum(len(batch) for batch in loader)


if __name__ == "__main__":
    for name, data, batch in [("text", Lines(), LINES), ("csv", Rows(), BATCH)]:
        # The first pass, which is not measured, starts the workers; the second one has them as well.
        loader = DataLoader(data, batch_size=batch, num_workers=2, persistent_workers=True)
        count(loader)
        started = time.perf_counter()
        seen = count(loader)
        print(json.dumps({"case": name, "seconds": time.perf_counter() - started, "records": seen}), flush=True)
