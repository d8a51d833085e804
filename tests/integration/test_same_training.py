"""Training is bit for bit what it would be without msmon."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Runner

pytestmark = pytest.mark.slow

KINDS: dict[str, dict[str, Any]] = {
    "weights": {"param_distribution": True},
    "gradients": {"wg_distribution": True},
    "micro-batches": {"wg_distribution": True, "monitor_mbs_grad": True},
    "optimizer state": {"mv_distribution": True},
    "communication": {"cc_distribution": {"enable": True, "cc_pre_hook": True}, "wg_distribution": True},
    "activations": {"xy_distribution": True, "all_xy": True},
    "directions": {"mg_direction": True},
    "updates": {"ur_distribution": True},
    "high-order features": {
        "recording_l2_features": True,
        "l2_targets": {"attention_hook": ["*self_attn"], "linear_hook": []},
    },
    "everything": {
        "mg_direction": True,
        "ur_distribution": True,
        "xy_distribution": True,
        "all_xy": True,
        "cc_distribution": {"enable": True, "cc_pre_hook": True},
        "param_distribution": True,
        "wg_distribution": True,
        "mv_distribution": True,
        "monitor_mbs_grad": True,
        "alert": {"rules": [{"rule_name": "AnomalyNan", "args": {"threshold": 0}}], "dump": True},
    },
}
SIX = {"ops": ["min", "max", "norm", "mean", "zeros", "nans"]}

SCRIPT = """
    import hashlib, json, os, random, sys
    import numpy, torch
    import torch.distributed as dist

    distributed = "RANK" in os.environ
    if distributed:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if distributed else 0
    library = sys.argv[1:]

    def digest(value):
        digest = hashlib.sha256()
        def feed(item):
            if isinstance(item, torch.Tensor):
                digest.update(item.detach().numpy().tobytes())
            elif isinstance(item, dict):
                for key in sorted(item, key=str):
                    digest.update(str(key).encode()); feed(item[key])
            elif isinstance(item, (list, tuple)):
                for part in item:
                    feed(part)
            else:
                digest.update(repr(item).encode())
        feed(value)
        return digest.hexdigest()

    def run(make_optimizer, scaled):
        torch.manual_seed(7); random.seed(7); numpy.random.seed(7)
        model = torch.nn.Sequential(torch.nn.Embedding(50, 16), torch.nn.Dropout(0.3), torch.nn.TransformerEncoderLayer(
            16, 2, 32, dropout=0.1, batch_first=True), torch.nn.Linear(16, 50))
        wrapped = torch.nn.parallel.DistributedDataParallel(model) if distributed else model
        optimizer = make_optimizer(model.parameters())
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
        scaler = torch.amp.GradScaler("cpu", enabled=scaled)
        monitor = None
        if library:
            from msmon.pytorch import TrainerMon
            monitor = TrainerMon(library[0], params_have_main_grad=False)
            monitor.set_monitor(wrapped, 2, optimizer)
        losses = []
        for step in range(6):
            optimizer.zero_grad()
            for micro in range(2):
                x = torch.randint(0, 50, (4, 6), generator=torch.Generator().manual_seed(100 * rank + 10 * step + micro))
                loss = torch.nn.functional.cross_entropy(wrapped(x).flatten(0, 1), x.roll(-1, 1).flatten()) / 2
                scaler.scale(loss).backward()
                losses.append(loss.item().hex())
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
        if monitor is not None:
            monitor.close()
        random_state = [torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()]
        return {"losses": losses, "weights": digest(model.state_dict()), "optimizer": digest(optimizer.state_dict()),
                "random": digest(random_state), "scale": scaler.state_dict()}

    result = {
        "AdamW": run(lambda p: torch.optim.AdamW(p, lr=1e-2), False),
        "SGD": run(lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9), False),
        "scaled": run(lambda p: torch.optim.AdamW(p, lr=1e-2), True),
        "fused": run(lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True), False),
    }
    with open(os.path.join(os.path.dirname(__file__), f"result{rank}.json"), "w") as file:
        json.dump(result, file)
    if distributed:
        dist.destroy_process_group()
"""


def results(folder: Path, ranks: int) -> list[Any]:
    found = [json.loads((folder / f"result{rank}.json").read_text()) for rank in range(max(ranks, 1))]
    for rank in range(max(ranks, 1)):
        (folder / f"result{rank}.json").unlink()
    return found


def test_single_process(runner: Runner) -> None:
    """Losses, weights, optimizer state and random states are equal to the bit, for each kind alone and all, and through TrainerMon."""
    script = runner.write(SCRIPT)
    assert runner.bare(script).returncode == 0
    (bare,) = results(runner.folder, 0)
    for name, config in KINDS.items():
        done = runner.monitored(script, config={**config, **SIX})
        assert done.returncode == 0, done.stderr
        assert results(runner.folder, 0) == [bare], name
        assert len(done.steps()) >= 24, name
    path = runner.write_config(**KINDS["everything"], **SIX)
    library = runner.bare(script, str(path), MONITOR_OUTPUT_DIR=str(runner.folder / "library"))
    assert library.returncode == 0, library.stderr
    assert results(runner.folder, 0) == [bare]
    assert list((runner.folder / "library").glob("*-rank0-*/param_updated_5-5.csv"))


def test_two_ranks(runner: Runner) -> None:
    """The same with DDP over two ranks, everything switched on; and with one rank alone that monitors (B19)."""
    script = runner.write(SCRIPT)
    assert runner.bare(script, ranks=2).returncode == 0
    bare = results(runner.folder, 2)
    assert bare[0]["AdamW"]["weights"] == bare[1]["AdamW"]["weights"]
    assert bare[0]["AdamW"]["losses"] != bare[1]["AdamW"]["losses"]
    for config in (KINDS["everything"], {**KINDS["everything"], "module_ranks": [0]}):
        done = runner.monitored(script, ranks=2, config={**config, **SIX})
        assert done.returncode == 0, done.stderr
        assert results(runner.folder, 2) == bare
    assert len(done.directories(0)) == 2
    assert len(done.directories(1)) == 1
