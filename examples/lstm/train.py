"""Train a byte-level LSTM on English text that every Python carries: the language reference in ``pydoc_data.topics``.

    python examples/lstm/train.py

Gradients through time are clipped. Nothing here knows of a monitor.
"""

import argparse
import pydoc_data.topics

import torch
from torch import nn
from torch.nn import functional as F

BYTES = 256


class Net(nn.Module):
    """Predicts the next byte."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.lstm = nn.LSTM(width, width, num_layers=depth, batch_first=True)
        self.head = nn.Linear(width, BYTES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        outputs, _ = self.lstm(self.embedding(tokens))
        return self.head(outputs)


def load_text() -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of the text, split into a part to train on and a part to validate on."""
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    border = int(0.95 * len(data))
    return data[:border], data[border:]


def loss_on(
    model: Net, data: torch.Tensor, count: int, length: int, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Mean cross-entropy of the next byte in ``count`` random windows of the text."""
    starts = torch.randint(len(data) - length, (count,), generator=generator)
    windows = data[starts[:, None] + torch.arange(length + 1)]
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def validate(model: Net, data: torch.Tensor, length: int) -> float:
    return loss_on(model, data, 64, length, torch.Generator().manual_seed(1)).item()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--length", type=int, default=48, help="bytes in a window")
    parser.add_argument("--batch", type=int, default=16, help="windows a step")
    parser.add_argument("--lr", type=float, default=5e-3)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    training, validation = load_text()
    model = Net(arguments.width, arguments.depth)
    optimizer = torch.optim.Adam(model.parameters(), lr=arguments.lr)

    for step in range(arguments.steps):
        loss = loss_on(model, training, arguments.batch, arguments.length)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 19 or step in (0, arguments.steps - 1):
            print(f"step {step + 1:4d}  loss {loss.item():.4f}", flush=True)

    print(f"validation loss {validate(model, validation, arguments.length):.4f}")


if __name__ == "__main__":
    main()
