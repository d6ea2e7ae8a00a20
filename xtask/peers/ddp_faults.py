"""One worker of a torch DistributedDataParallel job under torchrun, for `cargo xtask faults --compare ddp`: prints every
step that it has made, with the time, and saves a checkpoint now and then, from which it resumes. usage: ddp_faults.py
STEPS EVERY FILE PAUSE_MS."""
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BATCH = 48


def now():
    return int(time.time() * 1000)


def say(line):
    # One write, so that lines of several workers do not mix.
    os.write(1, f"{line}\n".encode())


steps, every, file, pause = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
torch.set_num_threads(1)
torch.manual_seed(7)
dist.init_process_group("gloo")
rank, members = dist.get_rank(), dist.get_world_size()
model = nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
step = 0
if os.path.exists(file):
    state = torch.load(file)
    step = state["step"]
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
say(f"begins after step {step} worker {rank} pid {os.getpid()} at {now()}")
trained = DistributedDataParallel(model)
while step < steps:
    images, labels = torch.randn(BATCH // members, 784), torch.randint(0, 10, (BATCH // members,))
    optimizer.zero_grad()
    time.sleep(pause / 1000)
    try:
        nn.functional.cross_entropy(trained(images), labels).backward()
    except RuntimeError:
        say(f"noticed at {now()}")
        raise
    optimizer.step()
    step += 1
    say(f"step {step} generation 0 members {members} worker {rank} at {now()}")
    if step % every == 0 and rank == 0:
        torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, file + ".new")
        os.replace(file + ".new", file)
dist.destroy_process_group()
