"""Switches ``dynamic_on`` in a configuration file; everything else in it stays as the user wrote it."""

from __future__ import annotations

import contextlib
import json
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from msmon.config.load import read_document
from msmon.errors import OutputError
from msmon.regular_file import write_whole

if TYPE_CHECKING:
    from os import PathLike

_KEYS = ("dynamic_on", "switch")


def set_dynamic(path: str | PathLike[str], *, on: bool) -> bool:
    """Set ``dynamic_on`` (or its older name, where that is there) in a file; the file is replaced whole.

    Returns:
        Whether the file was changed: one that says so already is not touched.

    Raises:
        ConfigError: The file cannot be read or is not JSON.
        OutputError: It cannot be written.
    """
    target = Path(path).resolve()  # a link stays a link
    document = read_document(target)
    key = next((key for key in _KEYS if key in document), _KEYS[0])
    if document.get(key) is on:
        return False
    text = _switched(target.read_text(encoding="utf-8-sig"), key, {**document, key: on}, on=on)
    try:
        write_whole(target, text.encode(), mode=stat.S_IMODE(target.stat().st_mode), exact=True)
    except OSError as error:
        raise OutputError(f"cannot write `{target}` ({error.strerror})", hint=f'set "{key}" in it by hand') from error
    return True


def _switched(text: str, key: str, wanted: dict[str, object], *, on: bool) -> str:
    """The text with one value exchanged; written anew only where that cannot be done safely."""
    value = json.dumps(on)
    candidates = [re.sub(rf'("{key}"\s*:\s*)(true|false|null)', rf"\g<1>{value}", text, count=1)]
    end = text.rfind("}")
    body = text[:end].rstrip()
    indent = re.search(r"\n([ \t]+)\"", text)
    gap = f"\n{indent[1]}" if indent else " "
    comma = "" if body.endswith("{") else ","
    candidates.append(f'{body}{comma}{gap}"{key}": {value}{text[len(body) : end] if indent else ""}{text[end:]}')
    for candidate in candidates:
        with contextlib.suppress(ValueError):
            if json.loads(candidate) == wanted:
                return candidate
    return json.dumps(wanted, indent=2, ensure_ascii=False) + "\n"
