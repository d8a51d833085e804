"""What a watched script saves and copies is what it would be without msmon: no hook, no name of ours."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Runner

SCRIPT = """
import copy, io, pickle, sys
import torch
from torch import nn
torch.manual_seed(0)
class Own(nn.Module):
    "Says itself what is saved."
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)
    def forward(self, x):
        return self.fc(x)
    def __getstate__(self):
        return dict(self.__dict__)
model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), Own())
def same(module, args, output):
    return output
model[0].register_forward_hook(same)  # the script's own stays
optimizer = torch.optim.Adam(model.parameters())
for _ in range(2):
    optimizer.zero_grad()
    model(torch.ones(2, 3)).pow(2).sum().backward()
    optimizer.step()
shallow = copy.copy(model[1])
assert shallow._forward_hooks is model[1]._forward_hooks, "as torch's own shallow copies"
whole = io.BytesIO()
torch.save(model, whole)
parts = [model, copy.deepcopy(model), optimizer, model.state_dict(), optimizer.state_dict(), model[0].weight, model[1:2]]
with open(sys.argv[1], "wb") as file:
    pickle.dump([whole.getvalue(), *map(pickle.dumps, parts)], file)
torch.save(model[1:2], sys.argv[1] + ".pt")
torch.jit.script(copy.deepcopy(model[1:]))
assert same in copy.deepcopy(model)[0]._forward_hooks.values()
"""

LOAD = """
import sys
sys.modules["msmon"] = None
import torch
model = torch.load(sys.argv[1], weights_only=False)
assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
torch.jit.script(model)(torch.ones(2, 3))
"""


@pytest.mark.slow
def test_saved_files_hold_no_trace(runner: Runner) -> None:
    """Files of modules, copies, optimizers and tensors: as the bare run's, and a module is scripted where msmon is not."""
    script = runner.write(SCRIPT)
    bare = runner.bare(script, str(runner.folder / "bare"))
    done = runner.monitored(
        script, str(runner.folder / "watched"), options=["--gradients", "--activations", "--stacks"]
    )
    assert (bare.returncode, done.returncode) == (0, 0), bare.stderr + done.stderr
    assert len(done.rows("actv")) == 2 * 2 * 5
    saved, expected = (pickle.loads((runner.folder / name).read_bytes()) for name in ("watched", "bare"))
    assert saved[0] == expected[0], "torch.save of the whole model"
    assert list(map(len, saved)) == list(map(len, expected))  # pickled storages have numbers of their own
    assert not any(word in content for content in saved for word in (b"msmon", b"nullcontext", b"ModuleHook"))
    loaded = [sys.executable, "-c", LOAD, str(runner.folder / "watched.pt")]
    again = subprocess.run(loaded, capture_output=True, text=True, timeout=900)
    assert again.returncode == 0, again.stderr
