"""However a training ends, what was computed is on disk, and the training ends as it would have without msmon."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from conftest import MSMON, Finished, Runner

from msmon.offline.analyse import analyse
from msmon.offline.reader import read_kind

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from msmon.offline.reader import RecordedRow

# Each script ends inside of `happens`, which it calls at three places of every step.
TRAINING = """
    import atexit, ctypes, os, signal, sys, threading, time
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters())
    {definition}
    for step in range({steps}):
        optimizer.zero_grad()
        happens(step, "forward")
        loss = model(torch.randn(5, 3)).pow(2).sum()
        loss.backward()
        happens(step, "backward")
        optimizer.step()
        happens(step, "step")
    print("loss", loss.item(), flush=True)
"""
PARAMETERS = ["0.weight", "0.bias", "1.weight", "1.bias"]


def training(runner: Runner, body: str = "pass", *, steps: int = 8, before: str = "pass") -> Path:
    """A script in which ``body`` runs at each place of each step."""
    lines = "\n        ".join(line for line in body.strip().splitlines())
    definition = f"{before}\n    def happens(step, place):\n        {lines}"
    return runner.write(TRAINING.format(definition=definition, steps=steps))


def by_step(rows: list[RecordedRow]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for row in rows:
        found.setdefault(row.step, []).append(row.name)
    return {step: sorted(names) for step, names in found.items()}


def assert_whole(finished: Finished, kind: str, steps: int) -> None:
    """Every parameter has a row in each of the steps before this one, and none after it."""
    assert by_step(finished.rows(kind)) == {step: sorted(PARAMETERS) for step in range(steps)}, kind


def assert_no_torn_file(finished: Finished) -> None:
    for directory in finished.directories():
        for path in directory.glob("*.csv"):
            assert path.read_bytes().endswith(b"\n"), path


def completed(finished: Finished) -> list[str]:
    return [line["complete"] for line in finished.steps()]


@pytest.mark.parametrize(
    ("ending", "status", "last_line"),
    [
        ("raise FloatingPointError('loss is NaN')", 1, "FloatingPointError: loss is NaN"),
        ("sys.exit(7)", 7, ""),
        ("sys.exit('no luck')", 1, "no luck"),
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(60)", -signal.SIGINT, "KeyboardInterrupt"),
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", -signal.SIGTERM, ""),
    ],
    ids=["exception", "sys.exit", "sys.exit text", "SIGINT", "SIGTERM"],
)
@pytest.mark.slow
def test_end_between_backward_and_step(runner: Runner, ending: str, status: int, last_line: str) -> None:
    """The interesting step is the one that died: its gradients are there, marked incomplete, and the end is the bare one."""
    script = training(runner, f"if (step, place) == (3, 'backward'): {ending}")
    finished = runner.monitored(script)
    assert (finished.returncode, finished.stdout) == (status, "")
    assert_whole(finished, "grad_unreduced", 4)
    assert_whole(finished, "grad_reduced", 3)
    assert completed(finished) == ["1", "1", "1", "0"]
    assert "3 training steps seen, 3 collected, 1 more cut short" in finished.stderr
    assert last_line in [*finished.stderr.splitlines(), ""]
    assert_no_torn_file(finished)


@pytest.mark.slow
def test_end_in_the_first_step(runner: Runner) -> None:
    """A script that dies before its first optimizer step leaves the gradients of that step."""
    finished = runner.monitored(training(runner, "if place == 'backward': raise ValueError('x')"))
    assert finished.returncode == 1
    assert_whole(finished, "grad_unreduced", 1)
    assert completed(finished) == ["0"]


@pytest.mark.slow
def test_end_inside_of_the_optimizer(runner: Runner) -> None:
    """An exception inside of optimizer.step leaves that step as far as it came: its gradients, and weights before it."""
    script = runner.write(
        """
        import torch
        class Failing(torch.optim.SGD):
            @torch.no_grad()
            def step(self, closure=None):
                if steps == 2:
                    raise RuntimeError("inside")
                super().step()
        model = torch.nn.Linear(3, 2)
        optimizer = Failing(model.parameters(), lr=0.1)
        for steps in range(5):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
        """
    )
    finished = runner.monitored(script, options=["--gradients", "--weights", "--ops", "norm"])
    assert finished.returncode == 1
    assert "RuntimeError: inside" in finished.stderr
    for kind, steps in (("grad_unreduced", 3), ("grad_reduced", 3), ("param_origin", 3), ("param_updated", 2)):
        assert by_step(finished.rows(kind)) == {step: ["bias", "weight"] for step in range(steps)}, kind
    assert completed(finished) == ["1", "1", "0"]


@pytest.mark.slow
def test_sigterm_while_the_main_thread_hangs(runner: Runner) -> None:
    """A process stuck in C (a collective, say) ends by SIGTERM within seconds, and the step in flight is written."""
    script = training(
        runner,
        """
if (step, place) == (3, 'backward'):
    threading.Thread(target=lambda: (time.sleep(0.3), os.kill(os.getpid(), signal.SIGTERM)), daemon=True).start()
    mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
""",
    )
    finished = runner.monitored(script)
    assert finished.returncode == -signal.SIGTERM
    assert_whole(finished, "grad_unreduced", 4)
    assert_whole(finished, "grad_reduced", 3)
    assert completed(finished) == ["1", "1", "1", "0"]


@pytest.mark.slow
def test_sigterm_while_waiting_in_c(runner: Runner) -> None:
    """The same in a C call that a signal wakes."""
    script = training(
        runner,
        """
if (step, place) == (3, 'step'):
    threading.Thread(target=lambda: (time.sleep(0.3), os.kill(os.getpid(), signal.SIGTERM)), daemon=True).start()
    ctypes.CDLL(None).sleep(60)
""",
    )
    finished = runner.monitored(script)
    assert finished.returncode == -signal.SIGTERM
    assert_whole(finished, "grad_reduced", 4)
    assert completed(finished) == ["1"] * 4


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before", "after"])
def test_own_sigterm_handler(runner: Runner, moment: str) -> None:
    """The script's own handler keeps working, installed before monitoring begins or after; the rest is as ever."""
    handler = "signal.signal(signal.SIGTERM, lambda *_: (print('checkpoint', flush=True), sys.exit(5)))"
    install = handler if moment == "before" else "pass"
    body = f"""
if (step, place) == (1, 'step') and {moment == "after"}: {handler}
if (step, place) == (3, 'backward'): os.kill(os.getpid(), signal.SIGTERM)
"""
    script = training(runner, body, before=install)
    finished = runner.monitored(script)
    assert (finished.returncode, finished.stdout) == (5, "checkpoint\n")
    assert_whole(finished, "grad_unreduced", 4)
    assert_whole(finished, "grad_reduced", 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
        "if (step, place) == (5, 'step'): os.kill(os.getpid(), signal.SIGKILL)",
        "if (step, place) == (5, 'step'): os._exit(9)",
    ],
    ids=["SIGKILL", "os._exit"],
)
def test_killed(runner: Runner, body: str) -> None:
    """Killed right after step 5 returned: all earlier steps are there in full, step 5 in full or not at all."""
    finished = runner.monitored(training(runner, body))
    assert finished.returncode in {9, -signal.SIGKILL}
    steps = by_step(finished.rows("grad_reduced"))
    assert set(range(5)) <= set(steps) <= set(range(6))
    assert all(names == sorted(PARAMETERS) for names in steps.values())
    assert_no_torn_file(finished)
    assert set(completed(finished)) == {"1"}
    assert len(completed(finished)) in {5, 6}


KILLED_OFTEN = """
    import os, random, signal, sys, threading, time
    import torch
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(20)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    children = []
    for trial in range(12):
        child = os.fork()
        if child == 0:
            os.environ["RANK"] = str(trial)
            reached = open(f"reached-{trial}", "wb", buffering=0)
            for step in range(10**6):
                optimizer.zero_grad()
                model(torch.randn(2, 4)).sum().backward()
                optimizer.step()
                reached.write(b".")
        children.append(child)
        while not os.path.exists(f"reached-{trial}") or os.path.getsize(f"reached-{trial}") < 3:
            time.sleep(0.01)
        time.sleep(random.Random(trial).random() * 0.3)
        os.kill(child, getattr(signal, sys.argv[1]))
        print(os.waitpid(child, 0)[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "steps_per_file"), [("SIGKILL", 1), ("SIGKILL", 1000), ("SIGTERM", 1)])
def test_killed_from_outside_many_times(runner: Runner, name: str, steps_per_file: int) -> None:
    """Killed at twelve random moments: every step but the last is there in full, and nothing inside of a file is torn.

    SIGTERM costs not even that: every step that returned is there in full, and the status is that of the signal.
    """
    config = {"wg_distribution": True, "ops": ["min", "max", "norm", "mean"], "step_count_per_record": steps_per_file}
    finished = runner.monitored(runner.write(KILLED_OFTEN), name, config=config)
    assert finished.returncode == 0, finished.stderr
    assert set(finished.stdout.split()) == {str(int(getattr(signal, name)))}
    lost = 1 if name == "SIGKILL" else 0
    for trial in range(12):
        reached = (runner.folder / f"reached-{trial}").stat().st_size
        steps = by_step(finished.rows("grad_reduced", trial))
        assert reached - lost <= len(steps) <= reached + 1
        assert list(steps) == list(range(len(steps)))
        assert all(len(names) == 40 for names in list(steps.values())[: reached - lost])
        assert reached - lost <= len([line for line in finished.steps(trial) if line["complete"] == "1"]) <= reached + 1
        for directory in finished.directories(trial):
            for path in directory.glob("*.csv"):
                lines = path.read_bytes().split(b"\n")
                assert len({line.count(b",") for line in lines[:-1]}) <= 2, path  # a comma more in a row: its shape


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "small disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize(("steps_per_file", "steps_made"), [(1, 200), (1000, 1200)])
def test_full_file_system(runner: Runner, small_disk: Path, steps_per_file: int, steps_made: int) -> None:
    """A disk that fills up is said once; training goes on to the same loss and exit 0; earlier rows are whole."""
    script = training(runner, steps=steps_made)
    bare = runner.bare(script)
    runner.output = small_disk / "out"
    config = {"wg_distribution": True, "ops": ["norm", "mean"], "step_count_per_record": steps_per_file}
    finished = runner.monitored(script, config=config)
    assert (finished.returncode, finished.stdout) == (0, bare.stdout)
    assert finished.stderr.count("No space left on device") == 1
    assert "Traceback" not in finished.stderr
    assert "switched off" not in finished.stderr
    steps = [int(line["step"]) for line in finished.steps()]
    assert steps[:5] == [0, 1, 2, 3, 4]
    rows = by_step(finished.rows("grad_reduced"))
    assert all(rows[step] == sorted(PARAMETERS) for step in steps)
    assert all(names == sorted(PARAMETERS) for names in rows.values())
    assert f"{steps_made - len(steps)} could not be written" in finished.stderr
    assert_no_torn_file(finished)


@pytest.mark.slow
def test_full_file_system_and_anomalies(runner: Runner, small_disk: Path) -> None:
    """Where rows and anomalies fill the disk, each is said once, every anomaly is counted, and what is kept is whole."""
    script = training(runner, steps=150)
    bare = runner.bare(script)
    runner.output = small_disk / "out"
    alert = {"rules": [{"rule_name": "AnomalyNan", "args": {"threshold": 0}}], "dump": True}
    config = {"wg_distribution": True, "ops": ["norm"], "step_count_per_record": 1000, "alert": alert}
    finished = runner.monitored(script, config=config)
    assert (finished.returncode, finished.stdout) == (0, bare.stdout)
    assert finished.stderr.count("anomalies could not be written (No space left on device)") == 1
    assert "Traceback" not in finished.stderr
    assert "switched off" not in finished.stderr
    assert "anomalies on this rank: 1,200, the first: AnomalyNan: norm" in finished.stderr
    folder = finished.output / "anomaly_detected" / "rank0"
    kept = json.loads((folder / "anomaly.json").read_text())
    assert 8 <= len(kept) < 1200
    assert len(kept) % 8 == 0
    assert len(kept) <= analyse(finished.output).total < 1200
    assert [path.name for path in folder.glob("*.tmp")] == []
    assert_no_torn_file(finished)


@pytest.mark.slow
def test_killed_with_many_anomalies(runner: Runner) -> None:
    """Killed when `anomaly.json` lacks what its journal has: `msmon analyse` knows all, and the next run puts it together."""
    alert = {"rules": [{"rule_name": "AnomalyNan", "args": {"threshold": 0}}], "dump": True}
    config = {"wg_distribution": True, "ops": ["norm"], "step_count_per_record": 1000, "alert": alert}
    body = "if (step, place) == (95, 'step') and not os.path.exists('killed'): open('killed', 'w'); os.kill(os.getpid(), 9)"
    script = training(runner, body, steps=97)
    finished = runner.monitored(script, config=config)
    assert finished.returncode == -signal.SIGKILL
    folder = finished.output / "anomaly_detected" / "rank0"
    total = analyse(finished.output).total
    assert total in {95 * 8, 96 * 8}
    assert 8 <= len(json.loads((folder / "anomaly.json").read_text())) < total
    first = json.loads(runner.call([MSMON, "analyse", str(finished.output), "--json", "-s", "90-94"]).stdout)
    assert first["total"] == 5 * 8
    config["append_output"] = ["Jan01_00-00-00", "Dec31_23-59-59"]
    assert runner.monitored(script, config=config).returncode == 0
    assert len(json.loads((folder / "anomaly.json").read_text())) == total + 97 * 8
    assert [path.name for path in sorted(folder.iterdir())] == [".lock", "anomaly.json", "runs.json"]
    assert (analyse(finished.output).total, analyse(finished.output, all_runs=True).total) == (97 * 8, total + 97 * 8)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["a file", "below a file", "read-only"])
def test_output_that_cannot_be_written(runner: Runner, place: str) -> None:
    """An output root that cannot be made is said; the training is the bare one, with exit 0."""
    script = training(runner)
    bare = runner.bare(script)
    if place == "read-only":
        runner.output = runner.folder / "read only"
        runner.output.mkdir()
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(runner.output)], capture_output=True, check=False
        )
        if mounted.returncode:
            pytest.skip("no tmpfs can be mounted")
    else:
        (runner.folder / "file").write_text("mine")
        runner.output = runner.folder / "file" / ("below" if place == "below a file" else "")
    try:
        finished = runner.monitored(script)
    finally:
        if place == "read-only":
            subprocess.run(["umount", str(runner.output)], check=True)
    assert (finished.returncode, finished.stdout) == (0, bare.stdout)
    assert "cannot write" in finished.stderr
    assert "nothing is recorded" in finished.stderr
    assert "Traceback" not in finished.stderr
    if place != "read-only":
        assert (runner.folder / "file").read_text() == "mine"


@pytest.mark.slow
def test_output_with_a_space(runner: Runner) -> None:
    """An output path with blanks and other letters is a path like any other."""
    runner.output = runner.folder / "mein Ergebnis 层" / "tief"
    finished = runner.monitored(training(runner, steps=2))
    assert finished.returncode == 0
    assert_whole(finished, "grad_reduced", 2)


@pytest.mark.slow
def test_output_removed_or_renamed(runner: Runner) -> None:
    """Whoever removes or renames what a run writes gets rows in new files, with headers and run.json, and one line each.

    Anomalies are all there again.
    """
    changes = """
    import glob, json, shutil
    directory = lambda: glob.glob("out/*rank0*")[0]
    def written(step):  # the line of a step is written after its rows, its anomalies after that
        try:
            lines = [line.split(",")[1] for line in open(directory() + "/steps.csv")]
            found = json.load(open("out/anomaly_detected/rank0/anomaly.json")).values()
            return str(step) in lines and step in [entry["step"] for entry in found]
        except (OSError, IndexError, ValueError):
            return False
    def change(step):
        while not written(step - 1):
            time.sleep(0.01)
        changes[step]()
    changes = {
        2: lambda: os.rename(directory(), "kept"),
        4: lambda: os.remove(directory() + "/grad_reduced_0-99.csv"),
        5: lambda: os.remove(directory() + "/run.json"),
        6: lambda: shutil.rmtree("out"),
    }
    """
    script = training(
        runner, "change(step) if place == 'backward' and step in changes else None", before=changes.strip()
    )
    alert = {"rules": [{"rule_name": "AnomalyNan", "args": {"threshold": 0}}], "dump": True}
    config = {"wg_distribution": True, "ops": ["norm"], "step_count_per_record": 100, "alert": alert}
    done = runner.monitored(script, config=config)
    assert done.returncode == 0, done.stderr
    kept = json.loads((runner.output / "anomaly_detected" / "rank0" / "anomaly.json").read_text())
    assert [entry["step"] for entry in kept.values()] == [step for step in range(8) for _ in range(8)]
    (directory,) = done.directories()
    assert done.run_file()["models"][0]["optimizers"] == ["Adam"]
    assert [line["step"] for line in done.steps()][-2:] == ["6", "7"]
    assert {step: len(names) for step, names in by_step(done.rows("grad_reduced")).items() if step > 5} == {6: 4, 7: 4}
    assert set(by_step(read_kind(runner.folder / "kept", "grad_reduced"))) == {0, 1}
    assert "could not be written" not in done.stderr
    said = [line for line in done.stderr.splitlines() if "was removed" in line]
    assert [line.split(str(runner.output))[1] for line in said] == [
        f"/{directory.name} was removed or renamed: rows go on in a new directory of that name",
        f"/{directory.name}/grad_reduced_0-99.csv was removed while the run goes on: rows go on in a new file",
        "/anomaly_detected/rank0/anomaly.json was removed or renamed: it is written again",
    ]


@pytest.mark.slow
def test_two_runs_at_once(runner: Runner) -> None:
    """Two runs started at the same time in the same root have a directory each, and all their rows and anomalies."""
    script = training(runner, "if step >= 12: model[1].bias.data.fill_(math.nan)", steps=20, before="import math")
    command = [MSMON, "run", "--output", str(runner.output), "--", sys.executable, str(script)]
    both = [
        subprocess.Popen(command, cwd=runner.folder, env=runner.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=900) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert outputs[0][0] == outputs[1][0]
    finished = Finished(0, "", "", runner.output)
    found = analyse(runner.output, all_runs=True)
    assert (found.total, found.left_out, found.unreadable) == (2 * 8 * 8, 0, [])
    assert analyse(runner.output).total == found.total // 2
    assert len(finished.directories()) == 2
    assert by_step(finished.rows("grad_reduced")) == {step: sorted(PARAMETERS * 2) for step in range(20)}


@pytest.mark.slow
def test_started_twice(runner: Runner) -> None:
    """The same script started again writes a directory of its own and leaves the first as it is."""
    script = training(runner, steps=2)
    first = runner.monitored(script)
    (directory,) = first.directories()
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    second = runner.monitored(script)
    assert len(second.directories()) == 2
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
    assert by_step(second.rows("grad_reduced")) == {step: sorted(PARAMETERS * 2) for step in range(2)}


@pytest.mark.slow
def test_forked_children(runner: Runner) -> None:
    """Children forked in the middle of a step write nothing and change nothing, however they end; the parent goes on."""
    body = """
if (step, place) == (3, 'backward'):
    for end in ("os._exit", "sys.exit", "SIGTERM"):
        child = os.fork()
        if child == 0:
            if end == "os._exit": os._exit(3)
            if end == "sys.exit": sys.exit(4)
            time.sleep(60)
        if end == "SIGTERM": os.kill(child, signal.SIGTERM)
        print(end, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
    script = training(runner, body)
    bare, finished = runner.bare(script), runner.monitored(script)
    assert (finished.returncode, finished.stdout) == (0, bare.stdout)
    assert finished.stdout.splitlines()[:3] == ["os._exit 3", "sys.exit 4", f"SIGTERM {-signal.SIGTERM}"]
    assert len(finished.directories()) == 1
    assert_whole(finished, "grad_unreduced", 8)
    assert_whole(finished, "grad_reduced", 8)
    assert completed(finished) == ["1"] * 8
    assert finished.stderr.count("training steps seen") == 1


LAST_LOOK = """
import atexit, os, sys, threading
from pathlib import Path
def look():
    threads = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("msmon"))
    Path(f"threads{os.environ.get('RANK', '0')}").write_text(" ".join(threads))
atexit.register(look)  # before msmon comes: it is called after msmon's
"""
TRAINS_IN_A_GROUP = """
import torch, torch.distributed as dist
if "RANK" in os.environ:
    dist.init_process_group("gloo")
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
if "RANK" in os.environ:
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(("ranks", "ending"), [(0, ""), (2, ""), (0, "sys.exit(0)"), (2, "sys.exit(0)"), (0, "1 / 0")])
def test_no_thread_of_ours_is_inside_torch_at_the_end(runner: Runner, ranks: int, ending: str) -> None:
    """Python ends threads that still run by unwinding them, and C++ code that is unwound in this way aborts the process.

    What remains is the thread that waits for signals, which calls nothing but the kernel.
    """
    script = runner.write(LAST_LOOK + TRAINS_IN_A_GROUP + ending)
    options = ["--alerts", "--on-alert", "stop", "--dynamic"]
    config = {"dynamic_on": True, "wg_distribution": True, "collect_times": 2}
    done = runner.monitored(script, ranks=ranks, options=options, config=config)
    assert "3 training steps seen, 2 collected" in done.stderr
    for rank in range(max(ranks, 1)):
        assert (runner.folder / f"threads{rank}").read_text() == "msmon-signals", done.stderr


def test_training_at_the_end_of_the_process(runner: Runner) -> None:
    """Steps made by exit handlers that run after msmon's own are recorded too."""
    later = "def train():\n    model(torch.ones(1, 2)).sum().backward()\n    optimizer.step()\natexit.register(train)\n"
    script = runner.write(LAST_LOOK + later + TRAINS_IN_A_GROUP)
    done = runner.monitored(script)
    assert done.returncode == 0, done.stderr
    assert {row.step for row in done.rows("grad_reduced")} == {0, 1, 2, 3}
