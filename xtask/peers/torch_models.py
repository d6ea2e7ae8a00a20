"""ResNet-20, of the scripts that train it."""
from torch import nn
from torch.nn import functional as F


class Residual(nn.Module):
    """Two convolutions beside a shortcut, which is subsampled and padded with zeros where the width doubles."""

    def __init__(self, before, width):
        super().__init__()
        self.stride = width // before
        self.first = nn.Conv2d(before, width, 3, stride=self.stride, padding=1, bias=False)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(width), nn.BatchNorm2d(width)])

    def forward(self, x):
        y = self.norms[1](self.second(self.norms[0](self.first(x)).relu()))
        if self.stride > 1:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, x.shape[1]))
        return (x + y).relu()


def resnet(width):
    """For pictures of 32 x 32; the published width is 16."""
    widths = [width] * 4 + [2 * width] * 3 + [4 * width] * 3
    stem = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    blocks = [Residual(before, after) for before, after in zip(widths, widths[1:])]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))
