"""The configuration file while the training runs: noticed when it changes, switched without touching the rest."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from msmon.config import watch
from msmon.config.edit import set_dynamic
from msmon.config.watch import ConfigWatcher, file_system, on_network
from msmon.errors import ConfigError, OutputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from msmon.config.schema import MonitorConfig


class Heard:
    """What a watcher said, in order."""

    def __init__(self) -> None:
        self.configs: list[MonitorConfig] = []
        self.event = threading.Event()

    def __call__(self, config: MonitorConfig) -> None:
        self.configs.append(config)
        self.event.set()

    def wait(self) -> MonitorConfig:
        assert self.event.wait(300), "no change was noticed"
        self.event.clear()
        return self.configs[-1]

    def silent(self, seconds: float = 0.6) -> bool:
        return not self.event.wait(seconds)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "monitor.json"
    path.write_text('{"dynamic_on": false}')
    return path


@pytest.fixture(params=["notified", "polling"])
def heard(request: pytest.FixtureRequest, path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Heard]:
    monkeypatch.setattr(watch, "POLL_SECONDS", 0.1)
    heard = Heard()
    watcher = ConfigWatcher(
        path, heard, content=path.read_bytes() if path.exists() else None, polling=request.param == "polling"
    )
    watcher.start()
    yield heard
    watcher.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "msmon-config"]


def test_written_and_replaced(heard: Heard, path: Path) -> None:
    """A change is heard once, whether the file is written in place, or replaced as editors do; a touch is none."""
    path.write_text('{"dynamic_on": true, "ops": ["max"]}')
    assert heard.wait().ops == ("max",)
    beside = path.with_name(".monitor.json.swp")
    beside.write_text('{"dynamic_on": true, "ops": ["min"]}')
    beside.replace(path)
    assert heard.wait().ops == ("min",)
    os.utime(path)
    assert heard.silent()
    assert len(heard.configs) == 2


def test_half_written(heard: Heard, path: Path) -> None:
    """What is seen half-written is looked at again, and nothing is said about it."""
    whole = json.dumps({"dynamic_on": True, "ops": ["mean"]})
    path.write_text(whole[:11])
    time.sleep(0.4)
    path.write_text(whole)
    assert heard.wait().ops == ("mean",)
    assert len(heard.configs) == 1


def test_broken_then_mended(
    heard: Heard, path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A broken file is said once with the reason and changes nothing; the mended one counts."""
    monkeypatch.setattr(watch, "HALF_WRITTEN_SECONDS", 0.3)
    path.write_text(f'{{"dynamic_on": yes, "{path}": 1}}')
    assert heard.silent(1.5)
    path.write_text(f'{{"dynamik_on": true, "{path}": 1}}')
    assert heard.silent(1.5)
    path.write_text('{"dynamic_on": true}')
    assert heard.wait().dynamic_on
    said = capfd.readouterr().err
    assert said.count("the changed configuration is not used") == 2
    assert "dynamik_on" in said


def test_deleted_and_back(heard: Heard, path: Path) -> None:
    """A file that is gone changes nothing; when it is back with other content, that counts."""
    path.unlink()
    assert heard.silent()
    path.write_text('{"dynamic_on": true, "collect_times": 3}')
    assert heard.wait().collect_times == 3


def test_through_a_link(tmp_path: Path) -> None:
    """A change behind a symbolic link is noticed."""
    real = tmp_path / "real" / "config.json"
    real.parent.mkdir()
    real.write_text("{}")
    link = tmp_path / "monitor.json"
    link.symlink_to(real)
    heard = Heard()
    watcher = ConfigWatcher(link, heard, content=real.read_bytes())
    watcher.start()
    real.write_text('{"dynamic_on": true}')
    assert heard.wait().dynamic_on
    watcher.stop()


@pytest.mark.parametrize(
    ("kind", "network"),
    [
        ("nfs4", True),
        ("nfs", True),
        ("lustre", True),
        ("fuse.sshfs", True),
        ("cifs", True),
        ("ext4", False),
        ("tmpfs", False),
    ],
)
def test_network_file_systems(kind: str, network: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mount that holds the folder decides; the longest one counts."""
    mounts = tmp_path / "mounts"
    mounts.write_text(
        f"/dev/root / ext4 rw 0 0\nserver:/x {str(tmp_path).replace(' ', chr(92) + '040')} {kind} rw 0 0\n"
    )
    assert file_system(tmp_path / "inside", mounts) == kind
    assert file_system(Path("/etc"), mounts) == "ext4"
    monkeypatch.setattr("msmon.config.watch.file_system", lambda folder: kind)
    assert on_network(tmp_path) is network


TEXTS = [
    '{\n    "targets": {"dynamic_on": {}},\n\t"dynamic_on" :  false,\n    "ops": ["norm"]\n}\n',
    '{"switch": false, "ops": ["norm"]}',
    '{\n  "ops": ["norm"]\n}\n',
    '{"ops": ["norm"]}',
    "{}",
    "{\n}",
    '\ufeff{"dynamic_on": false}',
]


@pytest.mark.parametrize("text", TEXTS)
def test_switched(text: str, path: Path) -> None:
    """Only the one value changes, back and forth; mode and the rest of the text stay."""
    path.write_text(text, encoding="utf-8")
    path.chmod(0o640)
    before = json.loads(text.lstrip("\ufeff"))
    key = "switch" if "switch" in before else "dynamic_on"
    assert set_dynamic(path, on=True)
    on = path.read_text(encoding="utf-8")
    assert json.loads(on) == {**before, key: True}
    assert list(json.loads(on))[: len(before)] == list(before)
    assert not set_dynamic(path, on=True)
    assert set_dynamic(path, on=False)
    if key in before:
        assert path.read_text(encoding="utf-8") == text.lstrip("\ufeff")
    assert path.stat().st_mode & 0o777 == 0o640
    assert [entry.name for entry in path.parent.iterdir()] == ["monitor.json"]


def test_cannot_be_switched(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is no JSON, or a place that cannot be written, is named with its reason; the file is unharmed."""
    path.write_text("{nonsense")
    with pytest.raises(ConfigError):
        set_dynamic(path, on=True)
    path.write_text("{}")

    def refuse(source: object, target: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OutputError, match="Read-only"):
        set_dynamic(path, on=True)
    assert path.read_text() == "{}"
    assert [entry.name for entry in path.parent.iterdir()] == ["monitor.json"]


def test_changed_before_it_is_watched(path: Path) -> None:
    """What was written between the reading of the file and the begin of the watching is a change."""
    known = path.read_bytes()
    path.write_text('{"dynamic_on": true, "ndigits": 3}')
    heard = Heard()
    watcher = ConfigWatcher(path, heard, content=known)
    watcher.start()
    assert heard.wait().ndigits == 3
    watcher.stop()


def test_stopping_is_silent(path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Watchdog's error about an emitter that is stopped between two looks is not shown; what else it says is."""
    watcher = ConfigWatcher(path, lambda _: None, content=None, polling=False)
    logger = logging.getLogger("watchdog.observers.inotify")
    stop = watcher._observer.stop

    def between_two_looks() -> None:
        logger.error("InotifyEmitter.queue_events() called when the thread is inactive")
        logger.error("something else")
        stop()

    monkeypatch.setattr(watcher._observer, "stop", between_two_looks)
    watcher.start()
    watcher.stop()
    assert [record.getMessage() for record in caplog.records if record.name == logger.name] == ["something else"]
    assert not logger.filters
