"""Train Megatron-core's own GPT with its distributed optimizer, in bfloat16, two micro-batches a step.

    torchrun --standalone --nproc-per-node 2 examples/megatron/train.py

Megatron-core needs a GPU a process. The text is the one behind Python's ``help()``. Nothing here knows of a monitor.
"""

import argparse
import time
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional as F

BYTES = 256
MICRO_BATCHES = 2


def batches(length: int, size: int):
    """Without end: random windows of the text."""
    text = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    while True:
        starts = torch.randint(len(text) - length, (size,), generator=generator)
        yield text[starts[:, None] + torch.arange(length + 1)].cuda()


def forward_step(data, model):
    windows = next(data)
    length = windows.shape[1] - 1
    positions = torch.arange(length, device=windows.device).expand(len(windows), length)
    mask = torch.triu(torch.ones(length, length, dtype=torch.bool, device=windows.device), 1)[None, None]
    logits = model(windows[:, :-1], positions, mask)

    def loss_of(logits):
        loss = F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())
        return loss, {"loss": loss.detach().clone()}  # Megatron divides the loss in place

    return logits, loss_of


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--length", type=int, default=32, help="bytes in a window")
    parser.add_argument("--batch", type=int, default=8, help="windows in a micro-batch of one process")
    parser.add_argument("--lr", type=float, default=3e-3)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=arguments.width,
        num_attention_heads=4,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    torch.manual_seed(0)
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=BYTES, max_sequence_length=arguments.length)
    how = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    model = DistributedDataParallel(config, how, Float16Module(config, model.cuda()))
    settings = OptimizerConfig(
        optimizer="adam",
        lr=arguments.lr,
        weight_decay=0.0,
        clip_grad=1.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
    )
    optimizer = get_megatron_optimizer(settings, [model])
    config.finalize_model_grads_func = finalize_model_grads

    data = batches(arguments.length, arguments.batch)
    run = get_forward_backward_func()
    for step in range(arguments.steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = run(
            forward_step_func=forward_step,
            data_iterator=data,
            model=[model],
            num_microbatches=MICRO_BATCHES,
            seq_length=arguments.length,
            micro_batch_size=arguments.batch,
            forward_only=False,
        )
        optimizer.step()
        if dist.get_rank() == 0 and (step % 20 == 19 or step == 0):
            print(f"step {step + 1:4d}  loss {losses[0]['loss'].item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.2)  # gloo's threads end on their own


if __name__ == "__main__":
    main()
