"""An output root that others can write to: what they put there is data, is not waited for, and is not written through."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest
from conftest import MSMON

if TYPE_CHECKING:
    from conftest import Finished, Runner

pytestmark = pytest.mark.slow

TRAIN = """
import os, pathlib
BEFORE
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    optimizer.zero_grad()
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    AFTER
print("trained")
"""

REPLACED = """
import json
settings = pathlib.Path(os.environ["MSMON_CONFIG"])
evil = pathlib.Path("evil")
evil.mkdir()
(evil / "__init__.py").write_text("open('was_here', 'w')")
document = json.loads(settings.read_text())
settings.write_text(json.dumps({**document, "package": str(evil.absolute())}))
"""

CUT = """
    [written] = pathlib.Path("out").glob("*/grad_reduced_0-999.csv") if step == 1 else [None]
    if written:
        import time
        while not written.read_text().count("\\n0,") == 4:
            time.sleep(0.01)
        written.write_text(CONTENT)
"""


def trained(runner: Runner, before: str = "", after: str = "pass", **env: str) -> Finished:
    script = runner.write(
        TRAIN.replace("BEFORE", before).replace("    AFTER", after if "\n" in after else f"    {after}")
    )
    config = {"wg_distribution": True, "step_count_per_record": 1000, "alert": {"rules": [], "dump": True}}
    done = runner.monitored(script, config=config, **env)
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    return done


def test_settings_that_somebody_has_changed(runner: Runner) -> None:
    """The code that they name is not run, training goes on, and that nothing is recorded is said."""
    done = trained(runner, REPLACED)
    assert not (runner.folder / "was_here").exists()
    assert "is not as msmon run has written it: nothing is recorded in this process" in done.stderr
    assert done.directories() == []


def test_settings_are_the_users_own(runner: Runner) -> None:
    """Nobody else may read them, and arguments can be left out of all files."""
    show = 'stat -c %a "$MSMON_CONFIG"; cat "$MSMON_CONFIG"'
    command = [MSMON, "run", "-o", str(runner.output), "--", "sh", "-c", show, "--token=secret"]
    mode, _, content = runner.call(command).stdout.partition("\n")
    assert (mode, json.loads(content)["command"][-1]) == ("600", "--token=secret")
    assert "secret" not in runner.call(command, MSMON_HIDE_ARGUMENTS="1").stdout
    done = trained(runner, MSMON_HIDE_ARGUMENTS="1")
    assert len(done.run_file()["command"]) == 1


@pytest.mark.parametrize("name", [".lock", "anomaly.json", "anomaly.journal.jsonl", "runs.json"])
def test_pipes_in_the_place_of_files(runner: Runner, name: str) -> None:
    """Nobody writes to them, and nobody waits for that."""
    folder = runner.output / "anomaly_detected" / "rank0"
    folder.mkdir(parents=True)
    os.mkfifo(folder / name)
    assert len(trained(runner).rows("grad_reduced")) == 8


def test_links_in_the_place_of_files(runner: Runner) -> None:
    """What they lead to stays as it is."""
    victim = runner.folder / "victim"
    victim.write_text("precious")
    folder = runner.output / "anomaly_detected" / "rank0"
    folder.mkdir(parents=True)
    for name in (".lock", "anomaly.json", ".anomaly.json.tmp", "anomaly.journal.jsonl", "runs.json", ".runs.json.tmp"):
        (folder / name).symlink_to(victim)
    done = trained(runner)
    assert victim.read_text() == "precious"
    assert len(done.rows("grad_reduced")) == 8


@pytest.mark.parametrize("content", ["''", "written.read_text()[:-30]"], ids=["to nothing", "in a line"])
def test_a_file_that_somebody_cuts_short(runner: Runner, content: str) -> None:
    """Rows go on after its last whole line, with a header: no hole, no torn line; and it is said."""
    done = trained(runner, after=CUT.replace("CONTENT", content))
    (directory,) = done.directories()
    text = (directory / "grad_reduced_0-999.csv").read_text()
    lines = text.splitlines()
    assert "\0" not in text
    assert lines[0] == "vpp_stage,name,step,norm,shape,dtype"
    assert len(lines) == 1 + (4 if content == "''" else 3 + 4)
    assert done.stderr.count("was cut short while the run goes on") == 1
