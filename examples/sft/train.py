"""Fine-tune a small Llama with trl's ``SFTTrainer`` on sentences that count.

    python examples/sft/train.py

Nothing is downloaded: the tokenizer knows sixty words. Nothing here knows of a monitor.
"""

import argparse
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer

WORDS = 60


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{number}": number for number in range(WORDS)} | {"<end>": WORDS, "<pad>": WORDS + 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))  # noqa: S106 - no password
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")  # noqa: S106 - no password


class Report(TrainerCallback):
    """One line now and then, in place of the Trainer's own."""

    def on_log(self, _arguments, state, _control, *, logs, **_more):
        if "loss" in logs:
            print(f"step {state.global_step:4d}  loss {float(logs['loss']):.4f}", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-2)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS + 2,
            hidden_size=arguments.width,
            intermediate_size=2 * arguments.width,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=16,
            bos_token_id=WORDS,
            eos_token_id=WORDS,
        )
    )
    texts = [" ".join(f"w{(3 * row + column) % WORDS}" for column in range(8)) for row in range(256)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model,
            SFTConfig(
                folder,
                max_steps=arguments.steps,
                max_length=16,
                per_device_train_batch_size=arguments.batch,
                learning_rate=arguments.lr,
                logging_steps=5,
                save_strategy="no",
                report_to=[],
                use_cpu=not torch.cuda.is_available(),
                bf16=False,
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_dict({"text": texts}),
            processing_class=make_tokenizer(),
            callbacks=[Report()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()


if __name__ == "__main__":
    main()
