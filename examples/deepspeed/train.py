"""Train a small network under DeepSpeed: optimizer state and gradients are spread over processes (ZeRO).

    torchrun --standalone --nproc-per-node 2 examples/deepspeed/train.py --stage 2

It learns to tell points inside a ring from those outside. Nothing here knows of a monitor.
"""

import argparse
import time

import deepspeed
import torch
import torch.distributed as dist
from torch import nn


def points(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    places = torch.rand(count, 2, generator=generator) * 4 - 2
    distance = places.norm(dim=1, keepdim=True)
    return places, ((distance > 0.7) & (distance < 1.4)).float()


def make_model(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--stage", type=int, default=2, help="of ZeRO: 0 to 3")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if not torch.cuda.is_available():
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled now, for minutes
    torch.manual_seed(0)
    model = make_model(arguments.width)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=arguments.lr),
        config={
            "train_micro_batch_size_per_gpu": arguments.batch,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": arguments.stage},
            "steps_per_print": 10**9,
        },
    )
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(arguments.steps):
        for _micro_batch in range(2):
            places, inside = points(arguments.batch, generator)
            loss = nn.functional.binary_cross_entropy_with_logits(
                engine(places.to(engine.device)), inside.to(engine.device)
            )
            engine.backward(loss)
            engine.step()
        if dist.get_rank() == 0 and (step % 20 == 19 or step == 0):
            print(f"step {step + 1:4d}  loss {loss.item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.2)  # gloo's threads end on their own


if __name__ == "__main__":
    main()
