"""Show what a run recorded: the first lines of each kind of file, and the step at which each layer's gradient was largest.

python examples/gpt/show.py monitor_output
"""

import itertools
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from msmon.offline.reader import kinds, read_kind, run_directories


def show_first_lines(directory: Path, console: Console) -> None:
    for kind in kinds(directory):
        path = min(
            directory.glob(f"{kind}_[0-9]*-*.csv"), key=lambda file: int(file.stem.rsplit("_", 1)[1].split("-")[0])
        )
        console.print(f"\n[bold]{path.name}[/]")
        with path.open(encoding="utf-8") as file:
            for line in itertools.islice(file, 3):
                console.print(line.rstrip(), markup=False)


def show_largest_gradients(directory: Path, console: Console) -> None:
    largest: dict[str, tuple[float, int]] = {}
    for row in read_kind(directory, "grad_unreduced"):
        layer = row.name.rsplit(".", 1)[0]
        largest[layer] = max(largest.get(layer, (0.0, 0)), (row["norm"], row.step))
    table = Table("layer", "largest gradient norm", "at step", title="\nWhere gradients were largest (this rank's own)")
    for layer, (norm, step) in largest.items():
        table.add_row(layer, f"{norm:.4g}", str(step))
    console.print(table)


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else "monitor_output")
    console = Console(highlight=False, soft_wrap=True)
    directories = run_directories(root, rank=0)
    if not directories:
        sys.exit(f"no run below {root}")
    console.print(f"latest run of rank 0: {directories[-1]}", markup=False)
    show_first_lines(directories[-1], console)
    show_largest_gradients(directories[-1], console)


if __name__ == "__main__":
    main()
