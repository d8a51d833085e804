"""Values that no option or argument can have: each ends as a usage error, of every command, those added later included."""

from __future__ import annotations

import json
import os
import subprocess
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from conftest import MSMON
from typer.testing import CliRunner

from msmon.bootstrap import launch
from msmon.errors import MsmonError, OptionError
from msmon_cli.app import app

if TYPE_CHECKING:
    from collections.abc import Iterator

LONG = "a" * 300
PATHS = [LONG, f"{LONG}/x", "x/" + LONG, "a/" * 3000, "~nosuchuser/x", "circle/x"]
TEXTS = [
    "",
    "²",
    "٣",
    "9" * 4400,
    "-1",
    "1e3",
    "0-",
    ",",
    "1,²",
    "[",
    "\x1b[31m",
    "\u202e",
    "\udcff",
    "~nosuchuser/x",
    LONG,
]
REQUIRED = {
    "run": ["--", "true"],
    "analyse": ["out"],
    "merge": ["out"],
    "csv2tb": ["out"],
    "validate-config": ["monitor.json"],
    "on": ["monitor.json"],
    "off": ["monitor.json"],
    "status": ["monitor.json"],
    "print-struct": ["--read", "struct.json"],
}


def parameters() -> Iterator[tuple[str, str, bool]]:
    """Command, option (empty: the argument), and whether it takes a path."""
    for command in app.registered_commands:
        assert command.callback is not None
        name = command.name or command.callback.__name__
        for annotation in typing.get_type_hints(command.callback, include_extras=True).values():
            kind, *described = typing.get_args(annotation) or (bool,)  # of what is returned there is none
            if described and kind is not bool and bool not in typing.get_args(kind):
                names = [described[0].default, *(getattr(described[0], "param_decls", None) or ())]
                option = max((one for one in names if isinstance(one, str) and one[:1] == "-"), key=len, default="")
                yield name, option, Path in {kind, *typing.get_args(kind)} or option == "--output"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hostile")
    directory = root / "out/Nov29_10-00-00-rank0-0123abcd"
    directory.mkdir(parents=True)
    (directory / "grad_reduced_0-0.csv").write_text("vpp_stage,name,step,norm\n0,fc,0,1\n")
    (root / "monitor.json").write_text('{"wg_distribution": true}')
    (root / "struct.json").write_text("{}")
    (root / "circle").symlink_to("circle")
    return root


@pytest.fixture
def invoke(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(launch, "run_command", lambda *_: None)

    def invoked(name: str, option: str, value: str) -> Any:
        required = REQUIRED.get(name, []) if option != "--read" else []
        arguments = [option, value, *required] if option else [value] if required[:1] != ["--"] else ["--", value]
        return CliRunner().invoke(app, [name, *arguments], env={"NO_COLOR": "1"})

    return invoked


@pytest.mark.parametrize(("name", "option", "is_path"), list(parameters()))
def test_hostile_values(name: str, option: str, is_path: bool, invoke: Any) -> None:
    """Nothing but errors of ours and usage errors, and nothing reaches the terminal that it would act on."""
    for value in [*TEXTS, *(PATHS if is_path else [])]:
        done = invoke(name, option, value)
        if isinstance(done.exception, MsmonError):
            assert done.exception.hint, value
        else:
            assert done.exception is None or isinstance(done.exception, SystemExit), value
            assert done.exit_code in {0, 1, 2}, value
        assert "\x1b[31m" not in done.output
        assert "\u202e" not in done.output


@pytest.mark.parametrize(("name", "option"), [(name, option) for name, option, is_path in parameters() if is_path])
def test_paths_that_no_file_can_have(name: str, option: str, invoke: Any) -> None:
    """They are refused by the name of the option, with a hint, before anything is read."""
    for value in PATHS:
        error = invoke(name, option, value).exception
        assert isinstance(error, OptionError), value
        assert (error.slug, error.exit_code) == ("wrong-option", 2)
        assert (option or "give ") in error.hint


def test_the_output_of_the_environment(invoke: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """MONITOR_OUTPUT_DIR is the same as --output."""
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", "~nosuchuser/x")
    assert isinstance(invoke("run", "--every", "2").exception, OptionError)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["run", "--ranks", "²", "--", "true"], 2),
        (["run", "--ranks", "9" * 4400, "--", "true"], 2),
        (["run", "--", LONG], 127),
        (["run", "--", f"./{LONG}"], 127),
        (["analyse", "out", "-s", "²"], 2),
        (["analyse", "~nosuchuser/x"], 2),
        (["csv2tb", "out", "-o", LONG], 2),
        (["merge", "out/none/such"], 1),
        (["print-struct", "--read", "struct.json", "-o", "none/such"], 1),
    ],
)
def test_as_the_user_sees_it(arguments: list[str], code: int, folder: Path) -> None:
    """A line, a hint, the page that explains it, and the exit code."""
    done = subprocess.run([MSMON, *arguments], cwd=folder, capture_output=True, text=True, timeout=900)
    error, _, rest = done.stderr.partition("\n\n")
    assert done.returncode == code
    assert error.startswith("error: ")
    assert rest.startswith("hint: ")
    assert "more: msmon explain " in rest


# Where stdout goes


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["run", "--help"], ["validate-config", "--schema"], ["analyse", "out", "--json"]],
)  # fmt: skip
def test_a_reader_that_goes_away(arguments: list[str], folder: Path) -> None:
    """`| head` is no error: the exit code is that of the command, and nothing is said on stderr."""
    codes = []
    for gone in (False, True):
        reading, writing = os.pipe()
        if gone:
            os.close(reading)
        with os.fdopen(writing, "wb") as stdout:
            process = subprocess.Popen(
                [MSMON, *arguments], cwd=folder, stdout=stdout, stderr=subprocess.PIPE, text=True
            )
        if not gone:
            with os.fdopen(reading, "rb") as file:
                file.read()
        said = process.communicate(timeout=900)[1]
        codes.append((process.returncode, said.replace("replaced", "wrote")))
    assert codes[0] == codes[1]
    assert "Exception" not in codes[1][1]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk(folder: Path) -> None:
    """What could not be printed is an error, said once."""
    with Path("/dev/full").open("w") as stdout:
        done = subprocess.run(
            [MSMON, "validate-config", "--schema"], cwd=folder, stdout=stdout, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr.startswith("error: cannot write what was to be printed")
    assert "Exception" not in done.stderr


def test_without_stdout(folder: Path) -> None:
    """A closed stdout is none of our business."""
    done = subprocess.run(
        f"'{MSMON}' analyse out --json >&-", shell=True, cwd=folder, stderr=subprocess.PIPE, text=True
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)


def test_any_encoding(folder: Path) -> None:
    """JSON stays JSON, and help stays readable, where the terminal knows no UTF-8."""
    (folder / "größe.json").write_text('{"wg_distribution": true}')
    done = subprocess.run(
        [MSMON, "validate-config", "größe.json", "--json"],
        cwd=folder,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
    )
    assert json.loads(done.stdout.decode("ascii"))["file"] == "größe.json"
