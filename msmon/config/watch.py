"""Notices that a configuration file has changed, on a thread of its own.

The kernel's notifications where the file system sends them, polling where it does not (network file systems). Editors
that replace the file, files that are half-written when they are seen, and files that disappear for a while are all the
same: the content counts, once it can be used.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer
from watchdog.observers.polling import PollingObserver

from msmon import log
from msmon.config.load import parse_config, read_document
from msmon.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from msmon.config.schema import MonitorConfig

POLL_SECONDS = 1.0
SETTLE_SECONDS = 0.05
"""An editor writes, renames and touches: its events are one change."""

HALF_WRITTEN_SECONDS = 2.0
"""A file that cannot be used is looked at again for so long before anything is said about it."""

_NETWORK = re.compile(
    r"nfs\d?|cifs|smb\d?|smbfs|fuse\..*|fuse|lustre|gpfs|beegfs|ceph|9p|virtiofs|afs|glusterfs|dpc|vboxsf"
)
_MOUNTS = Path("/proc/self/mounts")
_WATCHDOG = logging.getLogger("watchdog.observers.inotify")


class ConfigWatcher:
    """Calls ``changed`` with each new valid configuration.

    Args:
        path: The file; it may be absent for a while.
        changed: Called on the watcher's thread with the configuration.
        content: What is known of the file already; another content there is a change.
        options: Keys from the command line, which go over those of the file.
        polling: Poll instead of waiting for notifications; by default where the file system sends none.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        changed: Callable[[MonitorConfig], None],
        *,
        content: bytes | None,
        options: Mapping[str, Any] | None = None,
        polling: bool | None = None,
    ) -> None:
        self.path = Path(path).absolute()
        self._changed = changed
        self._options = dict(options or {})
        self._content = content
        self._wake = threading.Event()
        self._stopping = False
        folder = self.path.parent
        self.polling = on_network(folder) if polling is None else polling
        observer = PollingObserver(timeout=POLL_SECONDS) if self.polling else Observer()
        handler = _Handler({str(self.path), str(self.path.resolve())}, self._wake.set)
        for place in {folder, self.path.resolve().parent}:
            observer.schedule(handler, str(place), recursive=False)
        self._observer = observer
        self._thread = threading.Thread(target=self._loop, name="msmon-config", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._observer.daemon = True
        self._observer.start()
        self._thread.start()
        self._wake.set()  # it may have changed since it was read

    def stop(self) -> None:
        """Leave no thread behind."""
        self._stopping = True
        self._wake.set()
        # An emitter that is told to stop between two looks at the kernel's queue logs that as an error.
        _WATCHDOG.addFilter(_not_about_stopping)
        try:
            self._observer.stop()  # waits for the emitters
        finally:
            _WATCHDOG.removeFilter(_not_about_stopping)
        for thread in (self._observer, self._thread):
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(timeout=5)

    def _loop(self) -> None:
        while not self._stopping:
            self._wake.wait()
            self._wake.clear()
            self._look()

    def _look(self) -> None:
        """Take over the content once it can be used and differs from the one before."""
        waited = 0.0
        pause = SETTLE_SECONDS
        while not self._stopping:
            time.sleep(pause)
            content = self._read()
            if content is None or content == self._content:
                return  # gone for now, or only touched
            try:
                config = parse_config({**read_document(self.path), **self._options}, source=str(self.path))
            except ConfigError as error:
                waited += pause
                pause = 0.25
                if waited < HALF_WRITTEN_SECONDS:
                    continue
                self._content = content
                log.say(f"the changed configuration is not used: {error.message}", once=f"config:{content!r}")
            else:
                self._content = content
                self._changed(config)
            return

    def _read(self) -> bytes | None:
        try:
            return self.path.read_bytes()
        except OSError:
            return None


def _not_about_stopping(record: logging.LogRecord) -> bool:
    return "when the thread is inactive" not in record.getMessage()


class _Handler(FileSystemEventHandler):
    def __init__(self, paths: set[str], notify: Callable[[], None]) -> None:
        self._paths = paths
        self._notify = notify

    def on_any_event(self, event: FileSystemEvent) -> None:
        if event.event_type in {"opened", "closed_no_write"}:
            return
        if {os.fsdecode(event.src_path), os.fsdecode(event.dest_path)} & self._paths:
            self._notify()


def on_network(folder: Path) -> bool:
    """Whether a folder lies on a file system that other hosts change without a notification here."""
    return bool(_NETWORK.fullmatch(file_system(folder)))


def file_system(folder: Path, mounts: Path = _MOUNTS) -> str:
    """The type of the file system that a folder lies on; empty where nobody says."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    best, found = "", ""
    real = str(folder.resolve())
    for line in lines:
        _, place, kind, *_ = line.split(" ")
        place = place.replace("\\040", " ")
        if (real == place or real.startswith(place.rstrip("/") + "/")) and len(place) >= len(best):
            best, found = place, kind
    return found
