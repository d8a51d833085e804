"""Train a small language model whose parameters are spread over processes by ``fully_shard`` (FSDP2).

    torchrun --standalone --nproc-per-node 2 examples/fsdp/train.py

The text is one that every Python carries: the language reference in ``pydoc_data.topics``. Nothing here knows of a monitor.
"""

import argparse
import pydoc_data.topics

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

BYTES = 256


class Net(nn.Module):
    """Predicts the next byte."""

    def __init__(self, width: int, depth: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(BYTES, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, BYTES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.tokens(tokens) + self.positions(torch.arange(length))
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden)


def load_text() -> torch.Tensor:
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--length", type=int, default=48, help="bytes in a window")
    parser.add_argument("--batch", type=int, default=8, help="windows a step and process")
    parser.add_argument("--lr", type=float, default=3e-3)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = Net(arguments.width, arguments.depth, arguments.length)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)

    text = load_text()
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(arguments.steps):
        starts = torch.randint(len(text) - arguments.length, (arguments.batch,), generator=generator)
        windows = text[starts[:, None] + torch.arange(arguments.length + 1)]
        loss = F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if dist.get_rank() == 0 and (step % 20 == 19 or step == 0):
            print(f"step {step + 1:4d}  loss {loss.item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
