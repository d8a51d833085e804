"""Start and stop while the training runs: each row of the contract, with trainings that edit their own configuration."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from conftest import MSMON, TORCHRUN

from msmon.offline.reader import read_kind, run_directories

if TYPE_CHECKING:
    from conftest import Finished, Runner

pytestmark = pytest.mark.slow

SCRIPT = """
    import json, os, sys, threading, time
    import torch
    from torch import nn
    path, edits, steps, pause = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    rank = int(os.environ.get("RANK", 0))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 1))
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(steps):
        loss = model(torch.randn(5, 3, generator=torch.Generator().manual_seed(step + 100 * rank))).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        edit = edits.get(str(step))
        if edit is not None and rank == 0:
            with open(path, "w") as file:
                file.write(edit if isinstance(edit, str) else json.dumps(edit))
        time.sleep(2.0 if edit is not None else pause)
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
        hooks += sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())
        threads = sorted(t.name for t in threading.enumerate() if t.name.startswith(("msmon-config", "msmon-dyn", "msmon-w")))
        print(step, hooks, ",".join(threads), loss.item().hex(), flush=True)
    if "RANK" in os.environ:
        torch.distributed.destroy_process_group()
"""
ON = {"dynamic_on": True, "wg_distribution": True, "xy_distribution": True, "collect_times": 2}
OFF = {**ON, "dynamic_on": False}


def run(
    runner: Runner, config: dict[str, Any], edits: dict[int, Any] | None = None, *, steps: int = 10, ranks: int = 0,
    pause: float = 0.02, dynamic: str = "True",
) -> Finished:  # fmt: skip
    script = runner.write(SCRIPT)
    arguments = [str(runner.folder / "monitor.json"), json.dumps(edits or {}), str(steps), str(pause)]
    done = runner.monitored(script, *arguments, config=config, ranks=ranks, DYNAMIC_MONITOR=dynamic)
    assert done.returncode == 0, done.stderr
    return done


def collected(done: Finished, kind: str = "grad_reduced", rank: int = 0) -> list[int]:
    return sorted({row.step for row in done.rows(kind, rank)})


def content(runner: Runner) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((runner.folder / "monitor.json").read_text())
    return found


def test_static(runner: Runner) -> None:
    """Without DYNAMIC_MONITOR dynamic_on has no effect, and the file is not followed."""
    done = run(runner, OFF, {3: ON}, dynamic="False")
    assert collected(done) == [0, 1]
    assert content(runner) == ON


def test_off_at_the_start(runner: Runner) -> None:
    """Nothing is collected, no hook is put on, and no directory made."""
    done = run(runner, OFF)
    assert not done.directories()
    assert {line.split()[1] for line in done.stdout.splitlines()} == {"0"}


def test_on_at_the_start(runner: Runner) -> None:
    """Collection begins at step 1, takes collect_times steps, and the file is set to off; start_step does not count."""
    done = run(runner, {**ON, "start_step": 5})
    assert collected(done) == collected(done, "actv") == collected(done, "actv_grad") == [1, 2]
    assert content(runner) == {**OFF, "start_step": 5}
    hooks = {int(line.split()[0]): int(line.split()[1]) for line in done.stdout.splitlines()}
    assert hooks[1] > 0
    assert hooks[9] == 0


def test_switched_on_and_on_again(runner: Runner) -> None:
    """On while training: noticed in the next step, collected from the one after it on; off by itself, and on once more."""
    done = run(runner, OFF, {1: ON, 5: {**ON, "ops": ["max"]}})
    assert collected(done) == [3, 4, 7, 8]
    assert content(runner)["dynamic_on"] is False
    assert [row.step for row in done.rows("grad_reduced") if "max" in row.values] == [7] * 4 + [8] * 4


def test_changed_while_collecting(runner: Runner) -> None:
    """The step under way ends under the old file; the next begins under the new, counted from 0, with other kinds too.

    And with other alert rules.
    """
    alert = {"rules": [{"rule_name": "AnomalyNan", "args": {"threshold": 0}}], "dump": True}
    done = run(
        runner,
        {**ON, "collect_times": 100},
        {2: {**ON, "ops": ["max"], "param_distribution": True, "collect_times": 3, "alert": alert}},
    )
    assert collected(done) == [1, 2, 3, 4, 5, 6]
    assert collected(done, "param_origin") == [4, 5, 6]
    by_step = {row.step: set(row.values) & {"norm", "max"} for row in done.rows("grad_reduced")}
    assert by_step == {step: {"norm"} if step < 4 else {"max"} for step in range(1, 7)}
    found = json.loads((done.output / "anomaly_detected" / "rank0" / "anomaly.json").read_text())
    assert {entry["step"] for entry in found.values()} == {4, 5, 6}


@pytest.mark.parametrize("stop", [{**ON, "collect_times": 0}, OFF], ids=["no times", "off"])
def test_stopped_early(stop: dict[str, Any], runner: Runner) -> None:
    """collect_times 0, or off, ends collection at the next step."""
    done = run(runner, {**ON, "collect_times": 100}, {2: stop})
    assert collected(done) == [1, 2, 3]
    assert content(runner)["dynamic_on"] is False


def test_broken_file(runner: Runner) -> None:
    """A broken or invalid file is said, once each, and collection goes on; when idle, it changes nothing."""
    done = run(
        runner, {**ON, "collect_times": 100}, {3: '{"dynamic_on": tru', 5: {**ON, "opps": 1}}, pause=0.7, steps=12
    )
    assert collected(done) == list(range(1, 12))
    assert done.stderr.count("the changed configuration is not used") == 2
    assert "opps" in done.stderr
    idle = run(runner, OFF, {3: {**ON, "opps": 1}})
    assert "Traceback" not in idle.stderr


def test_deleted(runner: Runner) -> None:
    """A file that is deleted while collecting stops nothing; it cannot be written back, which is said."""
    script = runner.write(
        SCRIPT.replace("edit = edits.get", "os.remove(path) if step == 1 else None; edit = edits.get")
    )
    arguments = [str(runner.folder / "monitor.json"), "{}", "8", "0.1"]
    done = runner.monitored(script, *arguments, config={**ON, "collect_times": 3}, DYNAMIC_MONITOR="True")
    assert done.returncode == 0, done.stderr
    assert collected(done) == [1, 2, 3]
    assert "dynamic_on could not be set to false" in done.stderr


def test_ten_starts_and_stops(runner: Runner) -> None:
    """They leave no hook and no thread behind, and training is bitwise that without msmon."""
    edits = {4 * n: {**ON, "collect_times": 2, "ndigits": n} for n in range(10)}
    done = run(runner, OFF, edits, steps=44)
    assert collected(done) == sorted(step for n in range(10) for step in (4 * n + 2, 4 * n + 3))
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[-1][1] == "0"
    assert "msmon-write-back" not in lines[-1][2]
    bare = runner.bare(runner.folder / "train.py", str(runner.folder / "other.json"), "{}", "44", "0")
    assert [line.split()[-1] for line in bare.stdout.splitlines()] == [line[-1] for line in lines]


def test_all_ranks_at_the_same_step(runner: Runner) -> None:
    """Four ranks begin, change and end at the same steps, though rank 0 alone sees the file; it alone writes it back."""
    done = run(runner, OFF, {5: {**ON, "collect_times": 3}}, steps=60, ranks=4, pause=0.1)
    steps = [collected(done, rank=rank) for rank in range(4)]
    assert steps == [steps[0]] * 4
    assert len(steps[0]) == 3
    assert steps[0][0] >= 7
    assert content(runner)["dynamic_on"] is False
    assert not re.search("steps late", done.stderr)


def test_command_line_options_stay(runner: Runner) -> None:
    """Options given beside the file go over each new version of it."""
    script = runner.write(SCRIPT)
    runner.write_config(**OFF)
    arguments = [str(runner.folder / "monitor.json"), json.dumps({1: ON}), "8", "0.02"]
    options = ["--config", str(runner.folder / "monitor.json"), "--ops", "max", "--dynamic"]
    done = runner.monitored(script, *arguments, options=options)
    assert collected(done) == [3, 4], done.stderr
    assert all("max" in row.values and "norm" not in row.values for row in done.rows("grad_reduced"))


COMMUNICATION = SCRIPT.replace(
    "print(step,",
    'taken = torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "BackendSelect"); print(f"<{step}:{int(taken)}>"); print(step,',
)


def test_communication_follows(runner: Runner) -> None:
    """It is recorded in the steps that are; in between nothing of ours stands in torch's table of operators."""
    both = {"dynamic_on": True, "wg_distribution": True, "cc_distribution": {"enable": True}, "collect_times": 2}
    edits = {
        4: both,
        44: {**both, "cc_distribution": {"enable": True, "cc_pre_hook": True}},
        84: {**both, "cc_distribution": {}},
    }
    script = runner.write(COMMUNICATION)
    arguments = [str(runner.folder / "monitor.json"), json.dumps(edits), "120", "0.1"]
    off = {**both, "dynamic_on": False}
    done = runner.monitored(script, *arguments, config=off, ranks=2, DYNAMIC_MONITOR="True")
    assert done.returncode == 0, done.stderr
    assert "switched off" not in done.stderr
    for rank in (0, 1):
        steps = collected(done, rank=rank)
        assert len(steps) == 6, done.stderr
        assert collected(done, "cc", rank) == steps[:4]
        names = {step: {row.name for row in done.rows("cc", rank) if row.step == step} for step in steps[:4]}
        assert [any(name.endswith(".input") for name in names[step]) for step in steps[:4]] == [
            False,
            False,
            True,
            True,
        ]
        assert all("all_reduce_0.output" in found for found in names.values())
    taken = re.findall(r"<(\d+):([01])>", done.stdout)  # the lines of the ranks run into one another
    assert {found for step, found in taken if int(step) in {3, 43, 83, 119}} == {"0"}
    assert ("1" in {found for _, found in taken}) and len(taken) == 240


def test_targets_are_known_while_idle(runner: Runner) -> None:
    """A module without parameters is no unknown target though no hook is on it yet; one that matches nothing is said."""
    done = run(runner, {**OFF, "targets": {"1": {}}}, {1: {**ON, "targets": {"1": {}}}})
    assert collected(done, "actv") == [3, 4]
    assert "matches no module" not in done.stderr
    typed = run(runner, OFF, {1: {**ON, "targets": {"O": {}, "2": {}}}})
    assert typed.stderr.count("target `O` matches no module or parameter") == 1


SKEWED = """
    import msmon.backends.pytorch.dynamic as dynamic
    dynamic.POLL_SECONDS = {"1": 1.5, "2": 8.0, "3": 1000.0}.get(os.environ["RANK"], dynamic.POLL_SECONDS)
    torch.manual_seed(0)
"""


def test_skewed_watchers(runner: Runner) -> None:
    """A rank that looks seldom is in step with rank 0, one that hears late follows at once and says so, one that never
    hears records nothing, and all train on.
    """
    script = runner.write(SCRIPT.replace("    torch.manual_seed(0)\n", SKEWED))
    arguments = [str(runner.folder / "monitor.json"), json.dumps({5: {**ON, "collect_times": 1000}}), "120", "0.1"]
    done = runner.monitored(script, *arguments, config=OFF, ranks=4, DYNAMIC_MONITOR="True")
    assert done.returncode == 0, done.stderr
    steps = [collected(done, rank=rank) for rank in range(4)]
    assert steps[0] == steps[1] == list(range(steps[0][0], 120)), done.stderr
    assert steps[2] == list(range(steps[2][0], 120))
    assert steps[2][0] > steps[0][0]
    assert steps[3] == []
    assert re.search(r"\[rank 2\] heard of the changed configuration \d+ steps late", done.stderr)
    assert len(done.stdout.splitlines()) == 4 * 120


def test_restarted_by_torchrun(runner: Runner) -> None:
    """The workers that torchrun starts anew begin with what the file says then, and hear nothing of what was before."""
    fails = """
        if step == 12 and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os._exit(3)
        edit = edits.get(os.environ["TORCHELASTIC_RESTART_COUNT"] + ":" + str(step))
"""
    script = runner.write(SCRIPT.replace("        edit = edits.get(str(step))\n", fails))
    edits = {"0:2": {**ON, "collect_times": 1000}, "1:30": {**ON, "ops": ["max"]}}
    path = runner.write_config(**OFF)
    torchrun = [TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", str(script)]
    done = runner.call(
        [
            MSMON,
            "run",
            "--output",
            str(runner.output),
            "--config",
            str(path),
            "--",
            *torchrun,
            str(path),
            json.dumps(edits),
            "80",
            "0.1",
        ],
        DYNAMIC_MONITOR="True",
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",  # else gloo meets its addresses of before the restart, now and then
    )
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        (directory,) = done.directories(rank)  # the workers before had not begun to record
        rows = read_kind(directory, "grad_reduced")
        maxima = sorted({row.step for row in rows if "max" in row.values})
        assert len(maxima) == 2
        assert maxima[0] > 30
        assert {row.step for row in rows} == {*range(1, maxima[0]), *maxima}
    assert content(runner)["dynamic_on"] is False
    assert "steps late" not in done.stderr


def test_clock_going_backwards(runner: Runner) -> None:
    """A file that looks older after each edit, on a host whose clock falls back, is followed all the same."""
    source = SCRIPT.replace(
        "        time.sleep(2.0", "        os.utime(path, (1e9 - step, 1e9 - step)); time.sleep(2.0"
    )
    source = source.replace(
        "    path, edits", "    real = time.time; time.time = lambda: 2e9 - real()\n    path, edits", 1
    )
    script = runner.write(source)
    arguments = [str(runner.folder / "monitor.json"), json.dumps({1: ON, 5: {**ON, "ops": ["max"]}}), "10", "0.1"]
    done = runner.monitored(script, *arguments, config=OFF, DYNAMIC_MONITOR="True")
    assert done.returncode == 0, done.stderr
    assert collected(done) == [3, 4, 7, 8]


def test_two_jobs_follow_one_file(runner: Runner) -> None:
    """Two jobs that share configuration and output record each into directories of their own, and the file ends off."""
    script = runner.write(SCRIPT)
    path = runner.write_config(**OFF)
    command = [
        MSMON,
        "run",
        "--output",
        str(runner.output),
        "--config",
        str(path),
        "--dynamic",
        "--",
        sys.executable,
        str(script),
        str(path),
    ]
    environment = {**runner.environment}
    jobs = [
        subprocess.Popen([*command, "{}", "150", "0.1"], cwd=runner.folder, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]  # fmt: skip
    try:
        for job in jobs:
            assert job.stdout
            while not job.stdout.readline().startswith("5 "):
                assert job.poll() is None
        assert runner.call([MSMON, "on", str(path)]).returncode == 0
        for job in jobs:
            _, errors = job.communicate(timeout=900)
            assert job.returncode == 0, errors
            assert "Traceback" not in errors
    finally:
        for job in jobs:
            job.kill()
    directories = run_directories(runner.output)
    assert len({directory.name[-8:] for directory in directories}) == len(directories) == 2
    for directory in directories:
        assert len({row.step for row in read_kind(directory, "grad_reduced")}) == 2
    assert content(runner) == OFF


def test_read_only_file_system(runner: Runner) -> None:
    """A file that cannot be written back is said once; nothing more is recorded, and training goes on."""
    place = runner.folder / "readonly"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "none", str(place)], capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip("this user may not mount a file system")
    try:
        path = place / "monitor.json"
        path.write_text(json.dumps(ON))
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        done = runner.monitored(
            runner.write(SCRIPT), str(path), "{}", "10", "0.1", options=["--config", str(path), "--dynamic"]
        )
    finally:
        subprocess.run(["umount", str(place)], check=True)
    assert done.returncode == 0, done.stderr
    assert collected(done) == [1, 2]
    assert done.stderr.count("dynamic_on could not be set to false") == 1


def test_changed_before_training_begins(runner: Runner) -> None:
    """What the file says when the training process begins counts, not what it said when `msmon run` was called."""
    edit = 'from pathlib import Path; p = Path(sys.argv[1]); p.write_text(p.read_text().replace("false", "true"))'
    script = runner.write(SCRIPT.replace("    import torch\n", f"    {edit}\n    import torch\n", 1))
    path = runner.write_config(**OFF, mv_distribution=False)
    options = ["--config", str(path), "--ops", "max", "--dynamic"]
    done = runner.monitored(script, str(path), "{}", "8", "0.02", options=options)
    assert done.returncode == 0, done.stderr
    assert collected(done) == [1, 2]
    assert all("max" in row.values and "norm" not in row.values for row in done.rows("grad_reduced"))
    assert content(runner) == {**OFF, "mv_distribution": True}
    assert {row.step for row in done.rows("exp_avg")} == {1, 2}
