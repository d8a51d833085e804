"""Train a byte-level GPT on English text that every Python carries: the language reference in ``pydoc_data.topics``.

    torchrun --standalone --nproc-per-node 2 examples/gpt/train.py

One process works too (``python examples/gpt/train.py``). ``--blow STEP`` multiplies the learning rate for one step: an
honest blow-up to find. Nothing here knows of a monitor.
"""

import argparse
import os
import pydoc_data.topics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

BYTES = 256
BLOW_FACTOR = 300


class Attention(nn.Module):
    """Causal self-attention over ``heads`` heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.query_key_value(x).split(width, dim=2)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each with its own norm and a residual path around it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self, width: int, depth: int, heads: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.token_embedding = nn.Embedding(BYTES, width)
        self.position_embedding = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.final_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token_embedding(tokens) + self.position_embedding.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.final_norm(x))


def load_text() -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of the text, split into a part to train on and a part to validate on."""
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    border = int(0.95 * len(data))
    return data[:border], data[border:]


def sample(
    data: torch.Tensor, count: int, context: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random windows of the text, and the same windows one byte later."""
    starts = torch.randint(len(data) - context - 1, (count,), generator=generator)
    windows = torch.stack([data[start : start + context + 1] for start in starts.tolist()])
    return windows[:, :-1], windows[:, 1:]


def loss_of(model: nn.Module, tokens: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).view(-1, BYTES), following.reshape(-1))


@torch.no_grad()
def validate(model: GPT, data: torch.Tensor) -> float:
    model.eval()
    loss = loss_of(model, *sample(data, 64, model.context, torch.Generator().manual_seed(1))).item()
    model.train()
    return loss


@torch.no_grad()
def continue_text(model: GPT, start: str, length: int) -> str:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.tensor([list(start.encode())])
    for _ in range(length):
        probabilities = F.softmax(model(tokens[:, -model.context :])[:, -1] / 0.7, dim=-1)
        tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=generator)], dim=1)
    return bytes(tokens[0].tolist()).decode("latin1")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16, help="windows a step and process")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--blow", type=int, default=-1, metavar="STEP", help="multiply the learning rate at this step")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    distributed = "RANK" in os.environ
    if distributed:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if distributed else 0

    torch.manual_seed(0)
    model = GPT(arguments.width, arguments.depth, arguments.heads, arguments.context)
    trained = DistributedDataParallel(model) if distributed else model
    optimizer = torch.optim.AdamW(trained.parameters(), lr=arguments.lr, weight_decay=0.01)
    training, validation = load_text()
    generator = torch.Generator().manual_seed(rank)
    if rank == 0:
        size = sum(parameter.numel() for parameter in model.parameters())
        print(
            f"{size:,} parameters, {len(training):,} bytes, validation loss {validate(model, validation):.3f}",
            flush=True,
        )

    started = time.monotonic()
    for step in range(arguments.steps):
        warm_up = min(1.0, (step + 1) / 20)
        for group in optimizer.param_groups:
            group["lr"] = arguments.lr * warm_up * (BLOW_FACTOR if step == arguments.blow else 1)
        loss = loss_of(trained, *sample(training, arguments.batch, arguments.context, generator))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        if rank == 0 and (step % 50 == 49 or step == arguments.steps - 1):
            print(f"step {step + 1:4d}  loss {loss.item():.3f}  {time.monotonic() - started:5.1f} s", flush=True)

    if rank == 0:
        print(f"validation loss {validate(model, validation):.3f}")
        print(continue_text(model, "The ", 80))
    if distributed:
        dist.barrier()  # the other ranks wait for the validation of rank 0
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
