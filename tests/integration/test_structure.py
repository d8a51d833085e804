"""The structure of a model and the call stacks of its modules; ``print_struct`` ends the run, cleanly, after one step."""

from __future__ import annotations

import csv
import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
from conftest import MSMON, launcher

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Finished, Runner

pytestmark = pytest.mark.slow

LOOP = """
    import sys, torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)
            self.unused = nn.Linear(2, 2)
        def forward(self, x, scale=None, *, mask):
            return {"y": self.fc(x) * scale, "mask": mask, "name": "a"}

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()
            self.table = nn.Embedding(5, 4)
        def forward(self, x):
            found = self.block(self.table(x), 2.0, mask=x > 1)
            return found["y"], None, [found["mask"]]

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.tensor([1, 2, 3]))[0].sum().backward()
        optimizer.step()
        print("step", step, flush=True)
"""

DISTRIBUTED = """
    import torch, torch.distributed as dist
    from torch import nn
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        try:
            optimizer.zero_grad()
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
        except Exception:
            print("swallowed")
        print("step", step, flush=True)
"""

ACCELERATED = """
    import torch
    from accelerate import Accelerator
    from torch import nn
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2, 8)).sum())
            optimizer.step()
            optimizer.zero_grad()
        print("batch", step, flush=True)
"""

CELL = """
    source = '''
    import torch
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.LBFGS(model.parameters())
    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 8)).pow(2).sum()
        loss.backward()
        return loss
    for step in range(4):
        try:
            optimizer.step(closure)
        except EXCEPTION:
            print("swallowed")
        print("step", step, flush=True)
    '''
    import textwrap
    try:
        exec(compile(textwrap.dedent(source), "cell", "exec"))
    finally:
        print("finally")
"""

ADVERSARIES = """
    import torch
    from torch import nn
    critic, maker = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)), nn.Linear(8, 3)
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (critic, maker))
    for step in range(4):
        fake = maker(torch.ones(2, 8))
        first.zero_grad(); critic(fake.detach()).sum().backward(); first.step()
        second.zero_grad(); critic(fake).sum().backward(); second.step()
        print("step", step, flush=True)
"""


def print_struct(runner: Runner, script: Path, *options: str, ranks: int = 0) -> Finished:
    return runner.call([MSMON, "print-struct", *options, "--", *launcher(ranks), str(script)])


def structure(runner: Runner, rank: int = 0) -> dict[str, Any]:
    path = runner.folder / "monitor_output" / "module_struct" / f"rank{rank}" / "module_struct.json"
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_fields(runner: Runner) -> None:
    """The file says of each module what it takes, what it returns and which gradients come back."""
    copy = runner.folder / "copy.json"
    done = print_struct(runner, runner.write(LOOP), "--json", "-o", str(copy))
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "step" not in done.stdout
    found = structure(runner)
    assert json.loads(done.stdout) == json.loads(copy.read_text()) == found
    assert list(found) == ["0:table", "0:block.fc", "0:block", "0:", "0:block.unused"]
    assert found["0:block"] == {
        "input": {
            "config": "list[3]",
            "0": "size=(3, 4), dtype=torch.float32",
            "1": "<class 'float'>",
            "2": "size=(3,), dtype=torch.bool",
        },
        "output": {
            "config": "dict[3]",
            "y": "size=(3, 3), dtype=torch.float32",
            "mask": "size=(3,), dtype=torch.bool",
            "name": "<class 'str'>",
        },
        "input_grad": {"config": "tuple[2]", "0": "size=(3, 4), dtype=torch.float32", "1": "<class 'NoneType'>"},
        "output_grad": {"config": "tuple[2]", "0": "size=(3, 3), dtype=torch.float32", "1": "<class 'NoneType'>"},
        "class": "Block",
        "training": True,
        "parameters": {},
    }
    assert found["0:"]["output"] == {
        "config": "tuple[3]",
        "0": "size=(3, 3), dtype=torch.float32",
        "1": "<class 'NoneType'>",
        "2": "<class 'list'>",
    }
    assert found["0:block.fc"]["output"] == {"config": "tensor", "tensor": "size=(3, 3), dtype=torch.float32"}
    assert found["0:block.fc"]["parameters"]["weight"] == {"shape": [3, 4], "dtype": "torch.float32", "trainable": True}
    assert set(found["0:block.unused"]) == {"class", "training", "parameters"}
    tree = runner.call([MSMON, "print-struct", "--read", str(copy)])
    assert tree.returncode == 0
    assert "unused Linear" in tree.stdout
    assert tree.stderr.strip().startswith("∇")


@pytest.mark.parametrize(
    ("source", "ranks"), [(DISTRIBUTED, 2), (ACCELERATED, 0), (CELL.replace("EXCEPTION", "Exception"), 0)], ids=["torchrun", "accelerate", "cell"]
)  # fmt: skip
def test_stops_cleanly(runner: Runner, source: str, ranks: int) -> None:
    """No further step, no traceback, exit code 0, every rank with its file, ``finally`` blocks run."""
    done = print_struct(runner, runner.write(source), ranks=ranks)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "swallowed" not in done.stderr
    assert "step 0" not in done.stderr
    assert ("finally" in done.stderr) == ("finally" in source)
    for rank in range(max(ranks, 1)):
        described = structure(runner, rank)["0:"]
        assert described["output_grad"]["0"].startswith("size=(2, ")


def test_stops_though_somebody_catches_everything(runner: Runner) -> None:
    """The next step ends the process, still with exit code 0."""
    done = print_struct(runner, runner.write(CELL.replace("EXCEPTION", "BaseException")))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("swallowed") == 1
    assert "step 1" not in done.stderr
    assert structure(runner)


def test_two_models(runner: Runner) -> None:
    """The run goes on until both have made a step, and both are in the file."""
    done = print_struct(runner, runner.write(ADVERSARIES))
    assert done.returncode == 0, done.stderr
    assert "step 0" not in done.stderr
    found = structure(runner)
    assert set(found) == {"0:Sequential.0", "0:Sequential.1", "0:Sequential", "0:Linear"}
    assert all(described["output_grad"]["0"] != "<class 'NoneType'>" for described in found.values())


def test_every_rank_stops(runner: Runner) -> None:
    """With ``print_struct`` in a configuration and ranks chosen in it, the others do not wait for ever."""
    done = runner.monitored(runner.write(DISTRIBUTED), ranks=2, config={"print_struct": True, "module_ranks": [0]})
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "step 0" not in done.stdout
    assert done.stderr.count("training steps seen") == 1


@pytest.mark.parametrize(
    ("code", "said"), [("import sys; sys.exit(7)", ""), ("import torch", "without a training step")]
)
def test_commands_without_training(runner: Runner, code: str, said: str) -> None:
    """A command that fails has its exit code passed on; one that does not train is said to be that.

    What an earlier run, a moment ago, has left of another model is not shown as theirs.
    """
    earlier = runner.folder / "monitor_output" / "module_struct" / "rank0" / "module_struct.json"
    earlier.parent.mkdir(parents=True)
    earlier.write_text('{"0:": {"class": "Earlier"}}')
    done = runner.call([MSMON, "print-struct", "--", sys.executable, "-c", code])
    assert done.returncode == (1 if said else 7)
    assert said in done.stderr
    assert "Earlier" not in done.stdout
    assert "Traceback" not in done.stderr


def test_call_stacks(runner: Runner) -> None:
    """Of each module the user's frames, innermost first, from the first step that is collected; torch's are left out."""
    script = runner.write(LOOP)
    done = runner.monitored(script, config={"stack_info": True, "wg_distribution": True, "start_step": 1})
    assert done.returncode == 0, done.stderr
    with (done.directories()[0] / "stack_info.csv").open(newline="") as file:
        header, *lines = list(csv.reader(file))
    assert header == ["module_name", "stack_info"]
    stacks = dict(lines)
    assert list(stacks) == ["0:table", "0:block.fc", "0:block", "0:"]
    frames = [line for line in stacks["0:block.fc"].splitlines() if line.startswith("File")]
    assert [frame.split("in ")[-1].strip(", ") for frame in frames] == ["forward", "forward", "<module>"]
    assert all(str(script) in frame for frame in frames)
    assert 'return {"y": self.fc(x) * scale' in stacks["0:block.fc"]
    assert "site-packages/torch" not in "".join(stacks.values())
    assert done.steps()[0]["step"] == "1"
