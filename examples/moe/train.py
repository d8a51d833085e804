"""Train a mixture of experts to predict the next byte of the language reference in ``pydoc_data.topics``.

    python examples/moe/train.py

Each position goes to 2 of 4 experts; a loss of its own evens out their load. Nothing here knows of a monitor.
"""

import argparse
import pydoc_data.topics

import torch
from torch import nn
from torch.nn import functional as F

BYTES = 256
CHOSEN = 2
BALANCE = 0.05


class MixtureOfExperts(nn.Module):
    """Perceptrons of which a router picks ``CHOSEN`` a position; only those compute."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Mix the chosen experts' outputs.

        Args:
            x: Positions, [count, width].

        Returns:
            The mixture [count, width]; the loss that balances the load (equation 4 of Switch Transformers,
            arXiv:2101.03961: experts * sum of load * mean probability, 1 when even); each expert's load, of sum 1.
        """
        probabilities = self.gate(x).softmax(dim=-1)
        weights, chosen = probabilities.topk(CHOSEN, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        mixed = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows, places = (chosen == index).nonzero(as_tuple=True)
            mixed.index_add_(0, rows, weights[rows, places, None] * expert(x[rows]))
        load = F.one_hot(chosen, len(self.experts)).float().mean(dim=(0, 1))
        return mixed, len(self.experts) * (load * probabilities.mean(dim=0)).sum(), load


class Net(nn.Module):
    """Predicts the next byte from those before it."""

    def __init__(self, width: int, experts: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.join = nn.Linear(context * width, width)
        self.norm = nn.LayerNorm(width)
        self.mixture = MixtureOfExperts(width, experts)
        self.head = nn.Linear(width, BYTES)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = self.join(self.embedding(tokens).flatten(1))
        mixed, balance, load = self.mixture(self.norm(x))
        return self.head(x + mixed), balance, load


def load_text() -> torch.Tensor:
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--context", type=int, default=8, help="bytes to predict the next one from")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--lr", type=float, default=3e-3)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    data = load_text()
    model = Net(arguments.width, arguments.experts, arguments.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)

    for step in range(arguments.steps):
        starts = torch.randint(len(data) - arguments.context, (arguments.batch,))
        windows = data[starts[:, None] + torch.arange(arguments.context + 1)]
        predicted, balance, load = model(windows[:, :-1])
        loss = F.cross_entropy(predicted, windows[:, -1])
        optimizer.zero_grad()
        (loss + BALANCE * balance).backward()
        optimizer.step()
        if step % 20 == 19 or step in (0, arguments.steps - 1):
            shares = " ".join(f"{share:.2f}" for share in load.tolist())
            print(f"step {step + 1:4d}  loss {loss.item():.4f}  load {shares}", flush=True)


if __name__ == "__main__":
    main()
