"""Training and kernels of torch on one GPU, to compare with; one JSON line for each figure.

The models, batches and timing are those of the crate distribute-gpu-training, the kernels those of distribute-gpu-checks.
usage: torch_cuda.py [--device cuda|cpu] [--tiny] [--only training|kernels]
"""

import argparse
import json
import time

import torch
from torch import nn
from torch.nn import functional

CLASSES, VOCABULARY, HEADS, TENSORS = 10, 1024, 8, 200


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, sequence, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, sequence, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, sequence, width))
        return x + self.down(torch.relu(self.up(self.norm2(x))))


class Encoder(nn.Module):
    def __init__(self, width, layers, sequence):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.randn(sequence, width))
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, tokens):
        return self.out(self.norm(self.blocks(self.tokens(tokens) + self.positions)).mean(1))


def mlp(tiny):
    hidden = 32 if tiny else 1024
    layers = [nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES)]
    batch = 8 if tiny else 1024
    return nn.Sequential(*layers), torch.rand(batch, 784)


def cnn(tiny):
    channels, batch = (4, 8) if tiny else (32, 512)
    convolutions = [nn.Conv2d(1, channels, 3), nn.ReLU(), nn.Conv2d(channels, 2 * channels, 3), nn.ReLU(), nn.MaxPool2d(2)]
    linear = [nn.Flatten(), nn.Linear(2 * channels * 12 * 12, 128), nn.ReLU(), nn.Linear(128, CLASSES)]
    return nn.Sequential(*convolutions, *linear), torch.rand(batch, 1, 28, 28)


def transformer(tiny):
    width, layers, sequence, batch = (32, 2, 16, 8) if tiny else (512, 6, 256, 32)
    return Encoder(width, layers, sequence), torch.randint(VOCABULARY, (batch, sequence))


class Bench:
    def __init__(self, flags):
        self.device, self.tiny = torch.device(flags.device), flags.tiny
        self.rounds = 3 if flags.tiny else 11

    def seconds(self, work, steps):
        """The median time of one call, the clock read behind so many of them; the first round finds its algorithms."""
        times = []
        for _ in range(self.rounds + 1):
            if self.device.type == "cuda":
                before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda.synchronize()
                before.record()
                for _ in range(steps):
                    work()
                after.record()
                torch.cuda.synchronize()
                times.append(before.elapsed_time(after) / 1e3 / steps)
            else:
                started = time.perf_counter()
                for _ in range(steps):
                    work()
                times.append((time.perf_counter() - started) / steps)
        return sorted(times[1:])[self.rounds // 2]

    def train(self, build, dtype):
        """Parameters are bf16 with `bf16`, and f32, with bf16 where torch sees fit, with `bf16 autocast`."""
        torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
        torch.backends.cudnn.allow_tf32 = dtype == "tf32"
        torch.manual_seed(1)
        model, inputs = build(self.tiny)
        parameters = torch.bfloat16 if dtype == "bf16" else torch.float32
        model = model.to(self.device, parameters)
        inputs = inputs.to(self.device, parameters if inputs.is_floating_point() else None)
        classes = torch.arange(len(inputs), device=self.device) * 7 % CLASSES
        adam = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)

        def step():
            adam.zero_grad(set_to_none=True)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=dtype == "bf16 autocast"):
                logits = model(inputs)
            functional.cross_entropy(logits.float(), classes).backward()
            adam.step()

        seconds, batch = self.seconds(step, 2 if self.tiny else 10), len(inputs)
        row = {"framework": "torch", "model": build.__name__, "dtype": dtype, "batch": batch}
        row |= {"samples_per_second": batch / seconds, "step_ms": seconds * 1e3}
        print(json.dumps(row, ensure_ascii=False), flush=True)

    def kernel(self, what, bytes_moved, turns, work):
        """`work` takes turns with sets of buffers, so that none is in the cache when its turn comes."""
        at = iter(range(10**9))
        seconds = self.seconds(lambda: work(turns[next(at) % len(turns)]), 2 if self.tiny else 10)
        row = {"what": f"torch: {what}", "bytes": bytes_moved, "microseconds": seconds * 1e6}
        row |= {"gigabytes_per_second": bytes_moved / seconds / 1e9}
        print(json.dumps(row, ensure_ascii=False), flush=True)

    def kernels(self, size):
        name = f"{size >> 20} MiB"
        cache = 0 if self.device.type == "cpu" else torch.cuda.get_device_properties(self.device).L2_cache_size

        def sets(count, lengths=(size // 4,)):
            turns = min(max(-(-4 * cache // (count * size)), 1), 8)
            return [[torch.randn(n, device=self.device) for _ in range(count) for n in lengths] for _ in range(turns)]

        pairs = sets(2)
        self.kernel(f"copy in device memory, {name}", 2 * size, pairs, lambda x: x[0].copy_(x[1]))
        self.kernel(f"sum of 2 × {name} f32 into one (add_)", 3 * size, pairs, lambda x: x[0].add_(x[1]))
        self.kernel(f"scaling {name} of f32", 2 * size, pairs, lambda x: x[0].mul_(1.0))
        self.kernel(f"looking for NaN in {name} of f32", size, pairs, lambda x: torch.isfinite(x[0]).all())
        halves = [[x[0], x[1][: size // 8].view(torch.bfloat16)] for x in pairs]
        self.kernel(f"{name} of f32 to bf16", size + size // 2, halves, lambda x: x[1].copy_(x[0]))
        self.kernel(
            f"sum of 4 × {name} f32 into one (three add_)",
            5 * size,
            sets(4),
            lambda x: x[0].add_(x[1]).add_(x[2]).add_(x[3]),
        )
        lengths = [(2 * size // TENSORS // 16 * 4) if at % 2 == 0 else 256 for at in range(TENSORS)]
        total = sum(lengths)
        packs = [(tensors, torch.empty(total, device=self.device)) for tensors in sets(1, lengths)]
        self.kernel(f"packing {TENSORS} tensors, {name} (cat)", 8 * total, packs, lambda x: torch.cat(x[0], out=x[1]))
        views = [(tensors, list(bucket.split(lengths))) for tensors, bucket in packs]
        what = f"unpacking {TENSORS} tensors, {name} (foreach copy)"
        self.kernel(what, 8 * total, views, lambda x: torch._foreach_copy_(x[0], x[1]))
        del pairs, halves, packs, views
        for way in ("foreach", "fused"):
            for what, moved, make in [
                ("SGD, momentum", 5, lambda x: torch.optim.SGD(x, lr=1e-9, momentum=0.9, **{way: True})),
                ("Adam", 7, lambda x: torch.optim.Adam(x, lr=1e-9, **{way: True})),
            ]:
                bucket = nn.Parameter(torch.randn(size // 4, device=self.device))
                bucket.grad = torch.randn_like(bucket)
                optimizer = make([bucket])
                self.kernel(f"{what} on {name} of f32 ({way})", moved * size, [optimizer], lambda x: x.step())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models and few steps, to see that it works")
    parser.add_argument("--only", choices=["training", "kernels"])
    flags = parser.parse_args()
    if flags.device == "cuda" and not torch.cuda.is_available():
        print(f"skipped: torch {torch.__version__} finds no GPU")
        return
    bench = Bench(flags)
    if flags.only != "kernels":
        for build in (mlp, cnn, transformer):
            for dtype in ("f32", "tf32", "bf16", "bf16 autocast"):
                bench.train(build, dtype)
    if flags.only != "training":
        for size in [1 << 20] if flags.tiny else [64 << 20, 256 << 20]:
            bench.kernels(size)


if __name__ == "__main__":
    main()
