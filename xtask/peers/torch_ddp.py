"""Samples a second of the models of `cargo xtask bench train`, under torch's DistributedDataParallel over Gloo, one
thread for each process; a process alone has no such wrapper, and the threads of all cores. Prints one line of JSON.
usage: torch_ddp.py MODEL BATCH SECONDS with RANK and the like set."""
import json
import os
import resource
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_models

WIDTH, HEADS, TOKENS, VOCABULARY, BATCHES, WARM_UP = 128, 4, 32, 96, 32, 20
WORDS, WORD_WIDTH = 100_000, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, mask):
        normed = self.norms[0](x)
        x = x + self.attention(normed, normed, normed, attn_mask=mask, need_weights=False)[0]
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("mask", torch.triu(torch.ones(TOKENS, TOKENS, dtype=torch.bool), 1))

    def forward(self, x):
        x = self.tokens(x) + self.positions(torch.arange(TOKENS))
        for block in self.blocks:
            x = block(x, self.mask)
        return self.head(self.norm(x)).flatten(0, 1)


def mlp():
    return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))


def cnn():
    convolutions = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    convolutions += [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(nn.Unflatten(1, (1, 28, 28)), *convolutions, nn.Flatten(), nn.Linear(32 * 49, 10))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WORD_WIDTH), nn.Linear(WORD_WIDTH, 10)

    def forward(self, x):
        return self.head(self.words(x).mean(1))


def resnet():
    """ResNet-20 for pictures of 32 x 32."""
    return nn.Sequential(nn.Unflatten(1, (3, 32, 32)), torch_models.resnet(16))


name, batch, limit = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
torch.manual_seed(7)
dist.init_process_group("gloo")
alone = dist.get_world_size() == 1
torch.set_num_threads(os.cpu_count() if alone else 1)
models = {"mlp": mlp, "cnn": cnn, "transformer": Transformer, "embedding": Words, "resnet": resnet}
model = models[name]() if alone else DistributedDataParallel(models[name]())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
if name == "transformer":
    at = torch.arange(TOKENS + 1) + 17 * torch.arange(BATCHES * batch).unsqueeze(1)
    rows = (at * at + 31 * at) % 1009 % VOCABULARY
    inputs, targets = rows[:, :-1].split(batch), rows[:, 1:].split(batch)
else:
    if name == "embedding":
        inputs = (torch.arange(BATCHES * batch * TOKENS) * 2654435761 % WORDS).reshape(-1, TOKENS).split(batch)
    else:
        pixels = 3 * 32 * 32 if name == "resnet" else 784
        inputs = (torch.arange(BATCHES * batch * pixels) * 2654435761 % 1000 / 1000).reshape(-1, pixels).split(batch)
    targets = (torch.arange(BATCHES * batch) * 7 % 10).split(batch)


def steps(count):
    started = time.perf_counter()
    for step in range(count):
        at = (step + dist.get_rank()) % BATCHES
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(inputs[at]), targets[at].flatten()).backward()
        optimizer.step()
    return time.perf_counter() - started


steps(1)
first_step_s = time.time() - float(os.environ["XTASK_BENCH_STARTED"])
steps(WARM_UP - 1)
estimate = torch.tensor([steps(WARM_UP) / WARM_UP])
dist.all_reduce(estimate, dist.ReduceOp.MAX)
count = max(int(limit / estimate.item()), 5)
seconds = steps(count)
if dist.get_rank() == 0:
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    samples_per_s = count * batch * dist.get_world_size() / seconds
    line = {"samples_per_s": samples_per_s, "peak_mib": peak_mib, "first_step_s": first_step_s}
    print(json.dumps(line), flush=True)
dist.destroy_process_group()
