"""Fine-tune a small Llama with LoRA: only the adapters of peft are trained, by the Trainer of transformers.

    python examples/lora/train.py

The text is the one behind Python's ``help()``; nothing is downloaded. Nothing here knows of a monitor.
"""

import argparse
import tempfile
from pydoc_data.topics import topics

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

BYTES = 256


def pieces(length: int) -> list[dict[str, torch.Tensor]]:
    """The text in pieces of equal length, each to be foretold byte by byte."""
    text = "\n".join(topics.values()).encode()
    whole = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return [{"input_ids": piece, "labels": piece} for piece in whole[: len(whole) // length * length].view(-1, length)]


class Report(TrainerCallback):
    """One line now and then, in place of the Trainer's own."""

    def on_log(self, _arguments, state, _control, *, logs, **_more):
        if "loss" in logs:
            print(f"step {state.global_step:4d}  loss {float(logs['loss']):.4f}", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--length", type=int, default=64, help="bytes in a piece")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    parser.add_argument("--lr", type=float, default=1e-2)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(0)
    body = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=BYTES,
            hidden_size=arguments.width,
            intermediate_size=2 * arguments.width,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=arguments.length,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    layers = ["q_proj", "v_proj", "up_proj", "down_proj", "lm_head"]
    model = get_peft_model(body, LoraConfig(r=arguments.rank, lora_alpha=16, target_modules=layers))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            TrainingArguments(
                folder,
                max_steps=arguments.steps,
                per_device_train_batch_size=arguments.batch,
                learning_rate=arguments.lr,
                logging_steps=5,
                save_strategy="no",
                report_to=[],
                use_cpu=not torch.cuda.is_available(),
                disable_tqdm=True,
            ),
            train_dataset=pieces(arguments.length),
            callbacks=[Report()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()


if __name__ == "__main__":
    main()
