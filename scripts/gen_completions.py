"""Write ``completions/`` from the application. ``--check`` fails, with the difference, when a file is stale."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "completions"
FILES = {"bash": "msmon.bash", "zsh": "_msmon", "fish": "msmon.fish", "powershell": "msmon.ps1"}
PROGRAM = "from msmon_cli.app import app; app(prog_name='msmon')"

ZSH_REGISTER = "compdef _msmon_completion msmon\n"
ZSH_AUTOLOAD = """\
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
  _msmon_completion "$@"
else
  compdef _msmon_completion msmon
fi
"""


def main() -> None:
    """Write the files, or check them."""
    stale = []
    for shell, name in FILES.items():
        path, text = FOLDER / name, render(shell)
        current = path.read_text(encoding="utf-8") if path.exists() else ""
        if current == text:
            continue
        if "--check" in sys.argv:
            stale.append(name)
            lines, wanted = current.splitlines(keepends=True), text.splitlines(keepends=True)
            sys.stdout.writelines(difflib.unified_diff(lines, wanted, name, "wanted"))
        else:
            path.write_text(text, encoding="utf-8")
    if stale:
        sys.exit(f"completions/ is stale ({', '.join(stale)}): run `make docs`")


def render(shell: str) -> str:
    """The completion script of a shell, as Typer prints it, mended for zsh.

    zsh reads ``#compdef`` from the first line only, and runs an autoloaded file at the first TAB: it must complete
    then, not only register itself for the next one.
    """
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "_MSMON_COMPLETE": f"source_{shell}"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    text = done.stdout.strip() + "\n"
    if shell == "zsh":
        if not text.endswith(ZSH_REGISTER):
            sys.exit("Typer's zsh script has changed: look at what its last line does now")
        text = text.removesuffix(ZSH_REGISTER) + ZSH_AUTOLOAD
    return text


if __name__ == "__main__":
    main()
