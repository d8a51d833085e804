"""The Hugging Face Trainer and an accelerate loop, as users write them, under ``msmon run``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Runner

pytestmark = pytest.mark.slow

TRAINER = """
    import json, sys, torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                         num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=True)
    model = LlamaForCausalLM(config)
    rows = torch.randint(0, 64, (20, 8), generator=torch.Generator().manual_seed(1)).tolist()
    data = [{"input_ids": row, "labels": row} for row in rows]
    norms = []

    class Look(TrainerCallback):
        def on_pre_optimizer_step(self, *args, **kwargs):
            norms.append({n: float(p.grad.double().norm()) for n, p in model.named_parameters() if p.grad is not None})

    arguments = TrainingArguments("hf", max_steps=4, per_device_train_batch_size=2, gradient_accumulation_steps=2, use_cpu=True,
                                  report_to=[], save_steps=2, eval_strategy="steps", eval_steps=2, logging_steps=1,
                                  disable_tqdm=True, max_grad_norm=0.5)
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:4], callbacks=[Look()])
    loss = trainer.train().training_loss
    open("seen.json", "w").write(json.dumps({"norms": norms, "loss": loss.hex(), "names": [n for n, _ in model.named_parameters()]}))
"""

ACCELERATE = """
    import json, torch
    from accelerate import Accelerator

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    data = torch.utils.data.DataLoader(torch.randn(20, 4), batch_size=4)
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
    norms = []
    for x in data:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).pow(2).mean())
            if accelerator.sync_gradients:
                norms.append({n: float(p.grad.double().norm()) for n, p in model.named_parameters()})
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    open("seen.json", "w").write(json.dumps({"norms": norms, "names": [n for n, _ in model.named_parameters()]}))
"""


@pytest.mark.parametrize(
    ("source", "micro_steps"), [(TRAINER, ["2"] * 4), (ACCELERATE, ["2", "2", "1"])], ids=["Trainer", "accelerate"]
)
def test_rows_of_the_loop(runner: Runner, source: str, micro_steps: list[str]) -> None:
    """Steps, learned micro-batches, names and gradient norms are those that the loop itself sees; the same training as bare."""
    script = runner.write(source)
    assert runner.bare(script).returncode == 0
    bare = json.loads((runner.folder / "seen.json").read_text())
    done = runner.monitored(script, options=["--gradients", "--optimizer-state", "--ndigits", "16"])
    assert done.returncode == 0, done.stderr
    seen = json.loads((runner.folder / "seen.json").read_text())
    assert seen == bare
    assert [line["micro_steps"] for line in done.steps()] == micro_steps
    for kind in ("grad_unreduced", "grad_reduced"):
        by_step = {
            step: {row.name: row["norm"] for row in done.rows(kind) if row.step == step}
            for step in range(len(micro_steps))
        }
        assert set(by_step[0]) == set(seen["names"])
        if kind == "grad_unreduced" and source is TRAINER:
            continue  # the reduced gradient is clipped, the unreduced one is not
        assert [by_step[step] for step in by_step] == [pytest.approx(norms, rel=1e-6) for norms in seen["norms"]]
    assert {row.step for row in done.rows("exp_avg")} == set(range(1, len(micro_steps)))
