"""Train a small Llama on the Python language reference, byte by byte, with the Trainer of Hugging Face's transformers.

    python examples/trainer/train.py
    torchrun --standalone --nproc-per-node 2 examples/trainer/train.py

Nothing here knows of a monitor. The text is the one behind Python's ``help()``; nothing is downloaded.
"""

import argparse
import tempfile
import time
from pydoc_data.topics import topics

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

BYTES = 256


class Pieces(torch.utils.data.Dataset):
    """The text in pieces of equal length, each to be foretold byte by byte."""

    def __init__(self, length: int) -> None:
        text = "\n".join(topics.values()).encode()
        whole = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.pieces = whole[: len(whole) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.pieces[number], "labels": self.pieces[number]}


class Report(TrainerCallback):
    """One line now and then, in place of the Trainer's own."""

    def on_log(self, _arguments, state, _control, *, logs, **_more):
        if "loss" in logs and state.is_world_process_zero:
            print(f"step {state.global_step:4d}  loss {float(logs['loss']):.4f}", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--length", type=int, default=64, help="bytes in a piece")
    parser.add_argument("--batch", type=int, default=8, help="pieces in a micro-batch of one process")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches in a step")
    parser.add_argument("--lr", type=float, default=3e-3)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=BYTES,
            hidden_size=arguments.width,
            intermediate_size=2 * arguments.width,
            num_hidden_layers=arguments.depth,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=arguments.length,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            TrainingArguments(
                folder,
                max_steps=arguments.steps,
                per_device_train_batch_size=arguments.batch,
                gradient_accumulation_steps=arguments.accumulate,
                learning_rate=arguments.lr,
                seed=arguments.seed,
                logging_steps=5,
                save_strategy="no",
                report_to=[],
                use_cpu=not torch.cuda.is_available(),
                disable_tqdm=True,
            ),
            train_dataset=Pieces(arguments.length),
            callbacks=[Report()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        time.sleep(0.2)  # gloo's threads end on their own


if __name__ == "__main__":
    main()
