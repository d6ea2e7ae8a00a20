"""All-reduce of floats over torch's Gloo: one line of JSON per size. usage: gloo.py REPS SIZE... with RANK and the like set."""
import json
import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
fixed = int(sys.argv[1])
for size in map(int, sys.argv[2:]):
    values = torch.zeros(max(size // 4, 1))
    for _ in range(4):
        start = time.perf_counter()
        dist.all_reduce(values)
    once = time.perf_counter() - start
    reps = torch.tensor([fixed or min(max(int(0.25 / max(once, 1e-7)), 5), 20000)])
    dist.broadcast(reps, 0)
    seconds = []
    for _ in range(int(reps)):
        start = time.perf_counter()
        dist.all_reduce(values)
        seconds.append(time.perf_counter() - start)
    seconds.sort()
    if dist.get_rank() == 0:
        print(json.dumps({"bytes": size, "time_us": seconds[len(seconds) // 2] * 1e6}), flush=True)
dist.destroy_process_group()
