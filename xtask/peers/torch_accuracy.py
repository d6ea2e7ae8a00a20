"""The examples `resnet` and `char_lm` in torch, in one process: one line of JSON with what they have learnt.

usage: torch_accuracy.py resnet SEED EPOCHS WIDTH BATCH FOLDER, of CIFAR-10's binary files
       torch_accuracy.py char_lm SEED EPOCHS STEPS BATCH TEXT...
"""
import json
import math
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import torch_models


def initialised(model):
    """Gives layers the initial values of the examples."""
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
    return model


def resnet(seed, epochs, width, batch, folder):
    def read(names):
        records = np.concatenate([np.fromfile(Path(folder) / name, np.uint8).reshape(-1, 3073) for name in names])
        pictures = torch.from_numpy(records[:, 1:].astype(np.float32)).reshape(-1, 3, 32, 32)
        return pictures, torch.from_numpy(records[:, 0].astype(np.int64))

    (x, y), (test_x, test_y) = read([f"data_batch_{n}.bin" for n in range(1, 6)]), read(["test_batch.bin"])
    mean = x.mean(0)
    scale = 1 / (x - mean).pow(2).mean().sqrt()
    x, test_x = (x - mean) * scale, (test_x - mean) * scale

    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    model = initialised(torch_models.resnet(width))
    weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    rest = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": weights, "weight_decay": 1e-4}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    steps, step = epochs * math.ceil(len(x) / batch), 0
    for _ in range(epochs):
        for rows in torch.from_numpy(random.permutation(len(x))).split(batch):
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (100 if 4 * step >= 3 * steps else 10 if 4 * step >= 2 * steps else 1)
            pictures = []
            for picture in F.pad(x[rows], (4, 4, 4, 4)):
                down, right = random.integers(0, 9, 2)
                picture = picture[:, down : down + 32, right : right + 32]
                pictures.append(picture.flip(2) if random.integers(0, 2) else picture)
            optimizer.zero_grad()
            F.cross_entropy(model(torch.stack(pictures)), y[rows]).backward()
            optimizer.step()
            step += 1
    model.eval()
    with torch.no_grad():
        return 100 * (model(test_x).argmax(1) == test_y).float().mean().item()


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.projection = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.dense1, self.dense2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).reshape(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.dense2(self.dense1(self.norms[1](x)).relu().square())


class Transformer(nn.Module):
    def __init__(self, vocabulary, context, width=96, heads=4, layers=3):
        super().__init__()
        self.characters, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.layers = nn.Sequential(*[Layer(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, x):
        return self.head(self.norm(self.layers(self.characters(x) + self.positions.weight[: x.shape[1]])))


def char_lm(seed, epochs, steps, batch, *paths):
    context = 64
    files = [Path(path).read_text() for path in paths]
    characters = sorted(set("".join(files)) | {"\n"})
    index = {character: at for at, character in enumerate(characters)}
    train, validation = [], []
    for file in files:
        numbers = [index[character] for character in file]
        kept = len(numbers) - len(numbers) // 10
        train += numbers[:kept]
        validation += numbers[kept:]
    windows = torch.tensor(train).unfold(0, context + 1, context // 2)
    validation = torch.tensor(validation).unfold(0, context + 1, context)

    torch.manual_seed(seed)
    model = initialised(Transformer(len(characters), context))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.05)
    steps = min(steps, len(windows) // batch)
    total, made = epochs * steps, 0
    loss_of = lambda rows: F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    for _ in range(epochs):
        for rows in torch.randperm(len(windows)).split(batch)[:steps]:
            warm_up = max(total / 10, 1)
            fallen = min(max((made - warm_up) / max(total - warm_up, 1), 0), 1)
            rate = 4e-3 * min((made + 1) / warm_up, 1) * (0.05 + 0.475 * (1 + math.cos(math.pi * fallen)))
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad()
            loss_of(windows[rows]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            made += 1
    with torch.no_grad():
        losses = [(loss_of(rows).item(), len(rows)) for rows in validation.split(64)]
    return sum(loss * count for loss, count in losses) / len(validation) / math.log(2)


torch.set_num_threads(2)
name, numbers, rest = sys.argv[1], [int(number) for number in sys.argv[2:6]], sys.argv[6:]
print(json.dumps({"result": {"resnet": resnet, "char_lm": char_lm}[name](*numbers, *rest)}), flush=True)
