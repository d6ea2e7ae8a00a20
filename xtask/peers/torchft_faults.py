"""One group of a torchft job, for `cargo xtask faults --compare torchft`: prints every step that it has made, with the
time, until it is ended. usage: torchft_faults.py GROUP SECONDS with TORCHFT_LIGHTHOUSE and MASTER_PORT set."""
import logging
import os
import sys
import time
from datetime import timedelta

logging.disable(logging.WARNING)
import torch
from torch import nn
from torch.distributed import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

BATCH = 48


def now():
    return int(time.time() * 1000)


group, seconds = sys.argv[1], float(sys.argv[2])
torch.set_num_threads(1)
torch.manual_seed(7)
print(f"begins after step 0 at {now()}", flush=True)
# torchft's manager of the group looks for it at MASTER_PORT; kept until the process ends.
store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=True, wait_for_workers=False)
model = nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def load(state):
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def save():
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
    min_replica_size=1,
    load_state_dict=load,
    state_dict=save,
    replica_id=f"group{group}",
    timeout=timedelta(seconds=30),
)
trained = DistributedDataParallel(manager, model)
optimizer = Optimizer(manager, torch.optim.Adam(model.parameters(), lr=1e-3))
end = time.time() + seconds
while time.time() < end:
    images, labels = torch.randn(BATCH, 784), torch.randint(0, 10, (BATCH,))
    optimizer.zero_grad()
    time.sleep(0.005)
    nn.functional.cross_entropy(trained(images), labels).backward()
    before = manager.current_step()
    optimizer.step()
    after, members = manager.current_step(), manager.num_participants()
    what = f"step {after}" if after > before else f"dropped {before + 1}"
    print(f"{what} generation 0 members {members} at {now()}", flush=True)
# Its threads would wait for the others.
os._exit(0)
