"""What `msmon run` makes of its options, and what the command gets."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import MSMON, SIX, Finished, Runner

from msmon.alerts.catalogue import default_rules

NOT_REACHED = "msmon: nothing was reached: "
PRINT_SETTINGS = ["sh", "-c", 'cat "$MSMON_CONFIG"']
TRAIN = """
    import torch
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(6):
        model(torch.randn(4, 3)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def run(runner: Runner, *words: str, **env: str) -> Finished:
    return runner.call([MSMON, "run", *words], **env)


def settings(runner: Runner, *options: str, **env: str) -> dict[str, Any]:
    """What the processes of the run are told, as the command itself sees it."""
    done = run(runner, *options, "--", *PRINT_SETTINGS, **env)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, line.startswith(NOT_REACHED)) == (0, True)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


# Options

DEFAULT_ALERTS = {"rules": default_rules(), "dump": True}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", {"wg_distribution": True, "ops": SIX}),
        ("--ops norm", {"wg_distribution": True, "ops": ["norm"]}),
        ("--every 2 --targets fc", {"wg_distribution": True, "ops": SIX, "step_interval": 2, "targets": {"fc": {}}}),
        ("--weights", {"param_distribution": True}),
        ("--gradients --optimizer-state", {"wg_distribution": True, "mv_distribution": True}),
        ("--micro-batch-gradients", {"wg_distribution": True, "monitor_mbs_grad": True}),
        ("--weights --ops shape,max", {"param_distribution": True, "ops": ["shape", "max"]}),
        ("--weights -t a.* -t b", {"param_distribution": True, "targets": {"a.*": {}, "b": {}}}),
        ("--weights --start 3 --times 2", {"param_distribution": True, "start_step": 3, "collect_times": 2}),
        ("--weights --start 0 --ndigits 0", {"param_distribution": True, "start_step": 0, "ndigits": 0}),
        ("--weights --ranks 0,3 --format csv", {"param_distribution": True, "module_ranks": [0, 3], "format": "csv"}),
    ],
)  # fmt: skip
def test_options_are_the_configuration(options: str, expected: dict[str, Any], runner: Runner) -> None:
    """Each option is a key of the configuration; naming no kind of data means gradients, with all six statistics."""
    assert settings(runner, *options.split())["document"] == {**expected, "alert": DEFAULT_ALERTS}


def test_options_for_alerts(runner: Runner) -> None:
    """The default rules are on without a file, off or on as asked; code and commands stay out of the configuration."""
    path = runner.write_config(wg_distribution=True)
    assert "alert" not in settings(runner, "--config", path.name)["document"]
    assert settings(runner, "--config", path.name, "--alerts")["document"]["alert"] == DEFAULT_ALERTS
    assert settings(runner, "--no-alerts")["document"]["alert"] == {"rules": [], "dump": False}
    told = settings(
        runner, "--on-alert", "stop", "--on-alert-command", "true 'a b'", "--rule", "a.b:c", "--rule", "d:e.f"
    )
    assert told["alerts"] == {"on_alert": "stop", "command": "true 'a b'", "rules": ["a.b:c", "d:e.f"]}
    assert told["document"]["alert"] == DEFAULT_ALERTS


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rule", "os.system"], "MODULE:FUNCTION"),
        (["--rule", "a:b c"], "MODULE:FUNCTION"),
        (["--rule", ":b"], "MODULE:FUNCTION"),
        (["--on-alert-command", "no-such-command-here x"], "no command that exists"),
        (["--on-alert-command", "'open"], "No closing"),
        (["--on-alert", "explode"], "explode"),
    ],
)
def test_wrong_options_for_alerts(options: list[str], said: str, runner: Runner) -> None:
    """They are found before the command starts."""
    done = run(runner, *options, "--", "touch", "started")
    assert done.returncode == 2
    assert said in done.stderr
    assert not (runner.folder / "started").exists()


def test_options_for_alerts_without_a_rule(runner: Runner) -> None:
    """That nothing can come of them is said."""
    done = run(runner, "--no-alerts", "--on-alert", "stop", "--", "true")
    assert done.returncode == 0
    assert "no alert rule is on" in done.stderr


def test_options_go_over_the_file(runner: Runner) -> None:
    """What is named on the command line wins, zero included; every other key of the file stays."""
    path = runner.write_config(mv_distribution=True, ops=["max"], start_step=5, eps=0.5, targets={"a": {}})
    told = settings(runner, "--config", path.name, "--ops", "min", "--start", "0", "--targets", "b")
    assert told["source"] == str(path)
    assert told["document"] == {
        "mv_distribution": True, "ops": ["min"], "start_step": 0, "eps": 0.5, "targets": {"b": {}}
    }  # fmt: skip


def test_places_are_absolute(runner: Runner) -> None:
    """Relative places are those of the directory that msmon was started in: a process of the run may work elsewhere."""
    folder = runner.folder
    for options, env, root in [
        ([], {}, folder / "monitor_output"),
        (["--output", "deep/er"], {}, folder / "deep" / "er"),
        (["--output", "~/mine"], {"HOME": str(folder / "home")}, folder / "home" / "mine"),
        ([], {"MONITOR_OUTPUT_DIR": "from_env"}, folder / "from_env"),
        (["-o", "named"], {"MONITOR_OUTPUT_DIR": "from_env"}, folder / "named"),
    ]:
        assert settings(runner, *options, **env)["output_root"] == str(root)


def test_settings_name_the_run(runner: Runner) -> None:
    """The settings have the command and the micro-batches a step; the file and the run's id are found in two variables each."""
    told = settings(runner, "--grad-acc-steps", "4")
    assert told["grad_acc_steps"] == 4
    assert told["command"] == PRINT_SETTINGS
    show = 'echo "$MSMON_CONFIG|$PYTHON_MSMON_CONFIG|$MSMON_RUN_ID|$PYTHON_MSMON_RUN_ID"'
    path, forwarded, run_id, forwarded_id = run(runner, "--", "sh", "-c", show).stdout.strip().split("|")
    assert path == forwarded
    assert run_id == forwarded_id
    assert json.loads(Path(path).read_text())["command"] == ["sh", "-c", show]


def test_settings_do_not_pile_up(runner: Runner) -> None:
    """Runs that are asked for the same share one file, whatever else each leaves; another question has another file."""
    show = 'echo "$MSMON_CONFIG|$MSMON_RUN_ID"; ls -A "$(dirname "$MSMON_CONFIG")"'
    seen = [run(runner, "--output", "out", "--", "sh", "-c", show).stdout.splitlines() for _ in range(3)]
    (path,) = {lines[0].split("|")[0] for lines in seen}
    ids = [lines[0].split("|")[1] for lines in seen]
    name = Path(path).name
    assert len(set(ids)) == 3
    assert [sorted(lines[1:]) for lines in seen] == [[name, f"{name}.{identity}"] for identity in ids]
    assert [entry.name for entry in runner.output.iterdir()] == [name]
    run(runner, "--output", "out", "--weights", "--", "sh", "-c", show)
    refused = runner.write("no interpreter")
    refused.chmod(0o755)
    for command in ([sys.executable, "-c", ""], [str(refused)], ["sh", "-c", "kill -9 $$"]):
        run(runner, "--output", "out", "--", *command)
    assert len([entry for entry in runner.output.iterdir() if entry.suffix == ".json"]) == 5
    assert len(list(runner.output.iterdir())) == 5


@pytest.mark.slow
def test_settings_are_there_for_a_process_that_starts_late(runner: Runner) -> None:
    """One that a daemon starts when the command has long ended records under the id of its run, others or not."""
    show = "env | grep -E '^(MSMON|PYTHON)'"
    told = dict(line.split("=", 1) for line in run(runner, "-o", "out", "--", "sh", "-c", show).stdout.splitlines())
    run(runner, "-o", "out", "--", "sh", "-c", show)
    late = runner.bare(runner.write(TRAIN), **told)
    assert late.returncode == 0
    (directory,) = late.directories()
    assert directory.name.endswith(told["MSMON_RUN_ID"])
    assert late.run_file()["msmon"]["run_id"] == told["MSMON_RUN_ID"]


@pytest.mark.slow
def test_options_and_file_reach_the_training(runner: Runner) -> None:
    """run.json holds the whole configuration of the run, file and options together, and the rows follow it."""
    script = runner.write(TRAIN)
    options = ["--weights", "--optimizer-state", "--micro-batch-gradients", "--ops", "max,norm", "--targets", "0.*", "--every", "2",
               "--start", "1", "--times", "2", "--ranks", "0", "--ndigits", "3", "--format", "csv", "--grad-acc-steps", "1"]  # fmt: skip
    done = runner.monitored(script, options=options, config={"ops": ["min"], "step_count_per_record": 4, "eps": 0.25})
    assert (done.returncode, done.stdout) == (0, "")
    report = done.run_file()
    config = report["config"]
    expected = {
        "param_distribution": True, "wg_distribution": True, "monitor_mbs_grad": True, "mv_distribution": True,
        "ops": ["max", "norm"], "step_interval": 2, "start_step": 1, "collect_times": 2, "module_ranks": [0],
        "ndigits": 3, "format": "csv", "step_count_per_record": 4, "eps": 0.25,
    }  # fmt: skip
    assert {key: config[key] for key in expected} == expected
    assert list(config["targets"]) == ["0.*"]
    assert report["msmon"]["config_file"] == str(runner.folder / "monitor.json")
    assert report["msmon"]["command"] == [sys.executable, str(script)]
    for kind in ("param_origin", "param_updated", "grad_unreduced", "grad_reduced", "exp_avg"):
        rows = done.rows(kind)
        assert {(row.name, row.step) for row in rows} == {
            (f"0.{name}", step) for name in ("weight", "bias") for step in (1, 3)
        }
        assert set(rows[0].values) == {"max", "norm", "shape", "dtype"}


# What the user is told


def test_a_configuration_that_records_nothing_is_said(runner: Runner) -> None:
    """A file that switches no kind of data on: a warning, and the command runs with its own exit code."""
    runner.write_config(ops=["norm"], monitor_mbs_grad=True)
    done = run(runner, "--config", "monitor.json", "--", "sh", "-c", "echo ran; exit 7")
    assert (done.returncode, done.stdout) == (7, "ran\n")
    assert done.stderr.startswith("warning: no kind of data is switched on")
    assert done.stderr.count("\n") == 1
    done = run(runner, "--weights", "--forward-only", "--times", "0", "--", "true")
    assert done.stderr.splitlines() == [
        "warning: forward_only needs xy_distribution: as it is, it has no effect",
        "warning: collect_times is 0: nothing is recorded",
    ]


def test_a_place_that_cannot_be_written_is_said(runner: Runner) -> None:
    """A file where the output should go: a warning with the reason, and the command runs."""
    runner.write("", "occupied")
    done = run(runner, "--output", "occupied", "--", sys.executable, "-c", "print('ran')")
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert done.stderr.splitlines()[0].startswith(f"warning: cannot write to {runner.folder}/occupied")
    assert len(done.stderr.splitlines()) == 1


def test_dynamic_start_needs_a_file(runner: Runner) -> None:
    """--dynamic without --config: exit 2 before the command starts; from the environment alone it is a warning."""
    done = run(runner, "--dynamic", "--", "touch", "started")
    assert done.returncode == 2
    assert "--config" in done.stderr
    assert not (runner.folder / "started").exists()
    done = run(runner, "--", "touch", "started", DYNAMIC_MONITOR="True")
    assert done.returncode == 0
    assert "DYNAMIC_MONITOR" in done.stderr


# What the command gets


@pytest.mark.parametrize("dashes", [["--"], []], ids=["dashes", "bare"])
def test_everything_after_the_command_is_its_own(dashes: list[str], runner: Runner) -> None:
    """Options of ours, `-h`, a second `--`, empty words and blanks reach the command unchanged, with or without `--`."""
    script = runner.write("import json, sys; print(json.dumps(sys.argv[1:]))")
    words = ["--config", "mine.json", "-h", "--", "--help", "", "a  b", "--version", "-o", "*", "$HOME", "é"]
    done = run(runner, "--weights", *dashes, sys.executable, str(script), *words)
    assert done.returncode == 0
    assert json.loads(done.stdout) == words


def test_the_command_is_found_as_a_shell_finds_it(runner: Runner) -> None:
    """By name on the PATH, by a relative path with a slash, and by an absolute path; it sees the name it was given."""
    script = runner.write('#!/bin/sh\necho "$0"\n', "bin/tool")
    script.chmod(0o755)
    path = f"{script.parent}:/usr/bin:/bin"
    for word, shown in [("tool", str(script)), ("bin/tool", "bin/tool"), (str(script), str(script))]:
        assert run(runner, "--", word, PATH=path).stdout == f"{shown}\n"


def test_only_our_variables_are_added(runner: Runner) -> None:
    """The command's environment is the caller's with our variables and our folder on PYTHONPATH, and nothing else."""
    script = runner.write("import json, os; print(json.dumps(dict(os.environ)))")
    bare = json.loads(runner.bare(script, PYTHONPATH="lib").stdout)
    monitored = json.loads(runner.monitored(script, PYTHONPATH="lib").stdout)
    added = {"MSMON_CONFIG", "PYTHON_MSMON_CONFIG", "MSMON_RUN_ID", "PYTHON_MSMON_RUN_ID", "MSMON_MAIN_PID"}
    assert monitored.keys() - bare.keys() == added
    changed = {name for name in bare if bare[name] != monitored[name]}
    assert changed - {"PWD"} == {"PYTHONPATH"}  # a shell starts msmon where its path has a space, and sets PWD
    ours, rest = monitored["PYTHONPATH"].split(":", 1)
    assert Path(ours, "sitecustomize.py").is_file()
    assert rest == "lib"
