"""The command line as a user meets it: help, versions, errors with hints and exit codes, completions."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import MSMON

from msmon.bootstrap.launch import warnings_about
from msmon.config.schema import MonitorConfig

SNAPSHOTS = Path(__file__).with_name("snapshots")
REPOSITORY = Path(__file__).parents[2]
COMPLETIONS = REPOSITORY / "completions"
COLOURS = {"FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS", "CLICOLOR_FORCE"}
ENVIRONMENT = {
    **{k: v for k, v in os.environ.items() if not k.startswith(("MSMON", "MONITOR_", "DYNAMIC_")) and k not in COLOURS},
    "COLUMNS": "80",
    "NO_COLOR": "1",
    "PATH": f"{Path(MSMON).parent}{os.pathsep}{os.environ['PATH']}",
}


def msmon(*args: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """The real command, in a terminal of 80 columns without colour."""
    return subprocess.run(
        [MSMON, *args], cwd=cwd, env={**ENVIRONMENT, **env}, capture_output=True, text=True, timeout=900
    )


# Help and versions


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["analyse"],
        ["csv2tb"],
        ["doctor"],
        ["explain"],
        ["merge"],
        ["print-struct"],
        ["run"],
        ["on"],
        ["off"],
        ["status"],
        ["validate-config"],
    ],
    ids=lambda command: "".join(command) or "msmon",
)
def test_help_is_frozen(command: list[str], tmp_path: Path) -> None:
    """`--help` of every command, and `-h`, print what the snapshot holds; UPDATE_SNAPSHOTS=1 writes it anew."""
    snapshot = SNAPSHOTS / f"{'_'.join(['msmon', *command])}.txt"
    done = msmon(*command, "--help", cwd=tmp_path)
    text = "\n".join(line.rstrip() for line in done.stdout.splitlines()) + "\n"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        snapshot.write_text(text, encoding="utf-8")
    assert text == snapshot.read_text(encoding="utf-8")
    assert (done.returncode, done.stderr) == (0, "")
    assert msmon(*command, "-h", cwd=tmp_path).stdout == done.stdout


def test_every_command_has_a_help_snapshot(tmp_path: Path) -> None:
    """A command that is added needs a snapshot of its help."""
    from msmon_cli.app import app

    assert {f"msmon_{command.name}.txt" for command in app.registered_commands} | {"msmon.txt"} == {
        path.name for path in SNAPSHOTS.glob("msmon*.txt")
    }


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_version_names_msmon_python_and_torch(option: str, tmp_path: Path) -> None:
    """The versions stand on stdout, in one line."""
    done = msmon(option, cwd=tmp_path)
    python = ".".join(map(str, sys.version_info[:3]))
    assert done.returncode == 0
    assert done.stdout.startswith("msmon ")
    assert f"(python {python}, torch " in done.stdout
    assert done.stdout.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["run", "--help"]])
def test_showing_versions_or_help_imports_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    """No framework and nothing of the library is imported for versions or help: each TAB of a completion starts Python."""
    code = f"""
import atexit, sys
from msmon_cli.app import main
heavy = ("torch", "mindspore", "numpy", "msmon.config.schema")
atexit.register(lambda: print("heavy:", [name for name in heavy if name in sys.modules]))
sys.argv[1:] = {arguments}
main()
"""
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "heavy: []", done.stdout + done.stderr


@pytest.mark.parametrize("arguments", [[], ["run"]])
def test_nothing_to_do_shows_help(arguments: list[str], tmp_path: Path) -> None:
    """Without arguments the help is shown, and the exit code says that nothing was done."""
    done = msmon(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert "msmon run --config monitor.json" in done.stdout or "msmon run -- python train.py" in done.stdout


def test_an_unknown_command_names_the_close_one(tmp_path: Path) -> None:
    """A mistyped command is a usage error with a suggestion."""
    done = msmon("validate-confg", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "validate-config" in done.stderr


# msmon run: what ends it before the command starts


def test_an_unknown_option_of_run_is_refused(tmp_path: Path) -> None:
    """`run --confg` is not taken for the command: exit 2, the close option, and nothing started."""
    done = msmon("run", "--confg", "monitor.json", "--", "touch", "started", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--config" in done.stderr
    assert not list(tmp_path.iterdir())


def test_run_without_a_command_is_a_usage_error(tmp_path: Path) -> None:
    """Options and no command: exit 2, and the message names what is missing."""
    done = msmon("run", "--gradients", cwd=tmp_path)
    assert done.returncode == 2
    assert "COMMAND" in done.stderr


def write(folder: Path, name: str, text: str = "", mode: int = 0o644) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(mode)


@pytest.mark.parametrize(
    ("command", "code", "message", "hint"),
    [
        ("no-such-command", 127, "no such command: `no-such-command`", "msmon run -- python train.py"),
        ("./no-such-file", 127, "no such file: `./no-such-file`", "check the path"),
        ("train.py", 127, "is a file here, not on the PATH", "python train.py"),
        ("./train.py", 126, "cannot execute `./train.py`", "msmon run -- python ./train.py"),
        ("./data.txt", 126, "cannot execute `./data.txt`", "permissions"),
        ("./folder", 126, "cannot execute `./folder`", "permissions"),
        ("./no-interpreter", 126, "cannot execute `./no-interpreter`", "#!interpreter"),
        ("./no-first-line", 126, "cannot execute `./no-first-line`", "#!interpreter"),
    ],
)
def test_a_command_that_cannot_start(command: str, code: int, message: str, hint: str, tmp_path: Path) -> None:
    """127 for what does not exist and 126 for what cannot be executed, as a shell; a line, a hint, no traceback."""
    write(tmp_path, "train.py")
    write(tmp_path, "data.txt")
    write(tmp_path, "no-interpreter", "#!/no/such/interpreter\n", 0o755)
    write(tmp_path, "no-first-line", "echo started\n", 0o755)
    (tmp_path / "folder").mkdir()
    done = msmon("run", "--", command, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, "")
    error, _, rest = done.stderr.partition("\n\n")
    assert error.startswith("error: ")
    assert message in error
    assert rest.startswith("hint: ")
    assert hint in rest
    assert "more: msmon explain command-not-" in rest
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (
            '{"wg_distributon": true}',
            ["unknown key in `monitor.json` at `wg_distributon`", "did you mean `wg_distribution`?"],
        ),
        ('{"eps": "small"}', ["in `monitor.json` at `eps`", '"small"', "the default is 1e-08"]),
        ('{"ops": ["norm", "maxx"]}', ["in `monitor.json` at `ops[1]`", '"maxx"', "did you mean `max`?"]),
        ('{"ops": ["norm",]}', ["line 1, column 1", "`monitor.json`", "no trailing commas"]),
    ],
)
def test_a_bad_configuration_ends_before_the_command_starts(document: str, expected: list[str], tmp_path: Path) -> None:
    """Exit 2 with the file, the JSON path, the value, the close match and the fix; the command never runs."""
    write(tmp_path, "monitor.json", document)
    done = msmon("run", "--config", "monitor.json", "--", "touch", "started", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    for text in expected:
        assert text in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["monitor.json"]


def test_a_problem_is_said_to_be_where_it_is(tmp_path: Path) -> None:
    """A wrong option is on the command line, also beside a file; a wrong key is in the file, also beside options."""
    write(tmp_path, "good.json", '{"wg_distribution": true}')
    write(tmp_path, "bad.json", '{"ops": ["nrm"]}')
    option = msmon("run", "--config", "good.json", "--ops", "norm,nrm", "--", "true", cwd=tmp_path).stderr
    assert "in `command line` at `--ops`" in option
    assert "good.json" not in option
    file = msmon("run", "--config", "bad.json", "--every", "2", "--", "true", cwd=tmp_path).stderr
    assert "in `bad.json` at `ops[0]`" in file
    assert "command line" not in file


@pytest.mark.parametrize(
    "options",
    [
        ["--every", "0"],
        ["--start", "-1"],
        ["--ranks", "0,first"],
        ["--format", "tsv"],
        ["--ndigits", "21"],
        ["--steps-per-file", "0"],
    ],
)
def test_a_value_that_an_option_cannot_have(options: list[str], tmp_path: Path) -> None:
    """Zero included, a wrong value is refused by the option's name, never dropped."""
    done = msmon("run", *options, "--", "touch", "started", cwd=tmp_path)
    assert done.returncode == 2
    assert f"in `command line` at `{options[0]}`" in done.stderr
    assert not list(tmp_path.iterdir())


def test_debug_shows_the_traceback_of_an_error(tmp_path: Path) -> None:
    """MSMON_DEBUG=1 adds the traceback, for reports."""
    assert "Traceback" in msmon("run", "--", "no-such-command", cwd=tmp_path, MSMON_DEBUG="1").stderr


# msmon run: what it warns of


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("python -I train.py", "-I"),
        ("/usr/bin/python3.11 -E -u train.py", "-E"),
        ("python -uS train.py", "-S"),
        ("python -W ignore -Es train.py", "-E"),
        ("python -Wignore -I -m train", "-I"),
        ("python -X dev -I -c pass", "-I"),
        ("python --check-hash-based-pycs=never -I train.py", "-I"),
    ],
)
def test_flags_that_keep_us_out_are_named(command: str, flag: str) -> None:
    """-I, -E and -S are found among the interpreter's own flags, combined with others and behind flags with values."""
    (warning,) = warnings_about(command.split())
    assert warning.startswith(f"python {flag} ignores PYTHONPATH")


@pytest.mark.parametrize(
    "command",
    [
        "python train.py -I",
        "python -u train.py -E",
        "python -m train -S",
        "python -mtrain -S",
        "python -cpass -I",
        "python -c pass -E",
        "python -W I train.py",
        "python -XI train.py",
        "python -WS train.py",
        "python - -I",
        "torchrun -I train.py",
        "python",
        "bash train.sh -E",
        "env TASK=1 python train.py",
    ],
)
def test_flags_of_the_script_are_left_alone(command: str) -> None:
    """Only the interpreter's own flags matter; values of flags and the script's arguments do not."""
    assert warnings_about(command.split()) == []


@pytest.mark.parametrize(
    ("command", "word"),
    [
        ("env -i python train.py", "env -i"),
        ("sudo python train.py", "sudo"),
        ("opentelemetry-instrument python train.py", "opentelemetry-instrument msmon run"),
    ],
)
def test_commands_that_keep_us_out_are_named(command: str, word: str) -> None:
    """A command that drops the environment, or hides our sitecustomize, is said before it starts."""
    (warning,) = warnings_about(command.split())
    assert word in warning


def test_deepspeed_is_checked_for_what_hides_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sitecustomize.py in the directory and settings left in .deepspeed_env are each named."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert warnings_about(["deepspeed", "train.py"]) == []
    write(tmp_path, "sitecustomize.py")
    write(tmp_path, ".deepspeed_env", "PYTHON_MSMON_CONFIG=/old/run.json\n")
    hides, stale = warnings_about(["deepspeed", "train.py"])
    assert "sitecustomize.py" in hides
    assert ".deepspeed_env" in stale


# msmon validate-config


def test_a_good_configuration_is_ok(tmp_path: Path) -> None:
    """One line on stdout, exit 0, nothing on stderr."""
    write(tmp_path, "monitor.json", '{"wg_distribution": true}')
    done = msmon("validate-config", "monitor.json", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "monitor.json: ok\n", "")


def test_every_problem_of_a_configuration_is_shown(tmp_path: Path) -> None:
    """All problems at once, each with its path, value and fix, on stderr; exit 2."""
    write(tmp_path, "monitor.json", '{"wg_distribution": "yes", "ndigits": 30, "targts": {}}')
    done = msmon("validate-config", "monitor.json", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    for text in ['`wg_distribution`: "yes"', "`ndigits`: 30", "`targts`", "did you mean `targets`?", "without quotes"]:
        assert text in done.stderr
    assert done.stderr.count("error: ") == done.stderr.count("hint: ") == 3


def test_problems_as_json(tmp_path: Path) -> None:
    """--json prints one document on stdout, for problems as for their absence."""
    write(tmp_path, "bad.json", '{"targts": {}, "eps": 0}')
    done = msmon("validate-config", "bad.json", "--json", cwd=tmp_path)
    document = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (2, "")
    assert (document["schema_version"], document["file"]) == (1, "bad.json")
    assert {problem["path"] for problem in document["problems"]} == {"targts", "eps"}
    assert all(problem["hint"] and problem["slug"] and problem["message"] for problem in document["problems"])
    write(tmp_path, "good.json", '{"wg_distribution": true}')
    done = msmon("validate-config", "good.json", "--json", cwd=tmp_path)
    document = json.loads(done.stdout)
    assert (done.returncode, document["problems"]) == (0, [])
    assert any("grad_reduced" in line for line in document["records"])


def test_explain_says_what_would_be_recorded(tmp_path: Path) -> None:
    """--explain names kinds, columns, targets and steps."""
    write(
        tmp_path, "monitor.json", '{"mv_distribution": true, "ops": ["max"], "targets": {"fc": {}}, "step_interval": 7}'
    )
    done = msmon("validate-config", "--explain", "monitor.json", cwd=tmp_path)
    assert done.returncode == 0
    for text in ["exp_avg", "max", "fc", "every 7 steps"]:
        assert text in done.stdout
    assert "grad_reduced" not in done.stdout


def test_the_json_schema_has_every_key(tmp_path: Path) -> None:
    """--schema prints a JSON schema with all keys, which refuses others."""
    done = msmon("validate-config", "--schema", cwd=tmp_path)
    schema = json.loads(done.stdout)
    assert done.returncode == 0
    assert set(schema["properties"]) == set(MonitorConfig.model_fields)
    assert schema["additionalProperties"] is False


def test_validate_config_needs_a_file(tmp_path: Path) -> None:
    """Neither a file nor --schema is a usage error."""
    done = msmon("validate-config", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "FILE" in done.stderr


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """A missing file is named, with the system's reason."""
    done = msmon("validate-config", "monitr.json", cwd=tmp_path)
    assert done.returncode == 2
    assert "cannot read the file (No such file or directory) in `monitr.json`" in done.stderr


# Completions


def test_completions_are_fresh() -> None:
    """completions/ is what the generator makes of the application."""
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "scripts" / "gen_completions.py"), "--check"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_stale_completion_is_found(tmp_path: Path) -> None:
    """The check fails, with the difference, when a file differs: it can fail."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(REPOSITORY / "scripts" / "gen_completions.py", tmp_path / "scripts")
    shutil.copytree(COMPLETIONS, tmp_path / "completions")
    with (tmp_path / "completions" / "msmon.fish").open("a") as file:
        file.write("# stale\n")
    done = subprocess.run(
        [sys.executable, str(tmp_path / "scripts" / "gen_completions.py"), "--check"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 1
    assert "-# stale" in done.stdout
    assert "msmon.fish" in done.stderr


@pytest.mark.parametrize(("shell", "name"), [("bash", "msmon.bash"), ("zsh", "_msmon"), ("fish", "msmon.fish")])
def test_completions_are_valid_scripts(shell: str, name: str) -> None:
    """Each script passes its shell's syntax check."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run([shell, "-n", str(COMPLETIONS / name)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_zsh_script_completes_when_it_is_autoloaded() -> None:
    """`#compdef` is the first line, else zsh ignores the file; and the first TAB completes instead of registering."""
    lines = (COMPLETIONS / "_msmon").read_text().splitlines()
    assert lines[0] == "#compdef msmon"
    assert lines[-5:-2] == ["if [[ $zsh_eval_context[-1] == loadautofunc ]]; then", '  _msmon_completion "$@"', "else"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["msmon", "ru"], {"run"}),
        (
            ["msmon", ""],
            {
                "analyse",
                "csv2tb",
                "doctor",
                "explain",
                "merge",
                "off",
                "on",
                "print-struct",
                "run",
                "status",
                "validate-config",
            },
        ),
        (["msmon", "explain", "wrong-"], {"wrong-argument", "wrong-option"}),
        (["msmon", "run", "--opt"], {"--optimizer-state"}),
        (["msmon", "validate-config", "--"], {"--schema", "--explain", "--json", "--help"}),
    ],
)
def test_bash_completes(words: list[str], expected: set[str]) -> None:
    """The function that bash registers for `msmon` offers the commands and options that fit."""
    script = f"""
source {shlex.quote(str(COMPLETIONS / "msmon.bash"))}
eval "set -- $(complete -p msmon)"
while [[ $# -gt 0 && $1 != -F ]]; do shift; done
COMP_WORDS=("${{WORDS[@]}}"); COMP_CWORD={len(words) - 1}
$2 msmon
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    array = " ".join(f"'{word}'" for word in words)
    done = subprocess.run(
        ["bash", "-c", f"WORDS=({array})\n{script}"], env=ENVIRONMENT, capture_output=True, text=True, timeout=900
    )
    assert done.stderr == ""
    assert set(done.stdout.split()) == expected
