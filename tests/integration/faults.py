"""A small classifier trained by one process or by two, with a fault put in at one step: ``faults.py NAME``."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, FAULTY_STEP, LEARNING_RATE = 80, 50, 3e-3


class Activation(nn.ReLU):
    """A ReLU that can break."""

    fault = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fault == "nan":
            return super().forward(x).index_fill(1, torch.tensor([3]), float("nan"))
        return super().forward(x - 1e3 if self.fault == "dead" else x)


class Net(nn.Module):
    """Three hidden layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(16, 32), Activation())
        self.second = nn.Sequential(nn.Linear(32, 32), Activation())
        self.third = nn.Sequential(nn.Linear(32, 32), Activation())
        self.head = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.third(self.second(self.first(x))))


def nan_in_a_layer(net: Net) -> None:
    net.second[1].fault = "nan"


def gradient_times_1000(net: Net) -> None:
    net.second[0].weight.register_hook(lambda gradient: gradient * 1000)


def flipped_bit(net: Net) -> None:
    """The highest bit of the exponent of one weight of rank 1."""
    if int(os.environ.get("RANK", "0")) == 1:
        with torch.no_grad():
            net.second[0].weight.view(torch.int32)[2, 5] ^= 1 << 30


def learning_rate_times_100(net: Net) -> None:
    """Done in the loop."""


def dead_relu(net: Net) -> None:
    net.second[1].fault = "dead"


FAULTS = {f.__name__: f for f in (nan_in_a_layer, gradient_times_1000, flipped_bit, learning_rate_times_100, dead_relu)}


def main() -> None:
    fault = sys.argv[1]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = Net()
    trained: nn.Module = net
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        trained = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(trained.parameters(), lr=LEARNING_RATE)
    truth = torch.randn(16, 4)
    torch.manual_seed(int(os.environ.get("RANK", "0")))
    for step in range(STEPS):
        if step == FAULTY_STEP and fault in FAULTS:
            FAULTS[fault](net)
        rate = 100 if step == FAULTY_STEP and fault == "learning_rate_times_100" else 1
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * rate
        x = torch.randn(64, 16)
        loss = nn.functional.cross_entropy(trained(x), (x @ truth).argmax(dim=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"ended after step {step}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
