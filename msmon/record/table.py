"""The table of one training step: rows described by plain values, numbers that may still be on their way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


HISTOGRAM = "_histogram"
"""How the kinds of rows end that count elements by bin."""


class Row(NamedTuple):
    """One tensor seen in one step.

    Attributes:
        kind: The file it belongs to, such as ``grad_reduced``.
        name: Its name in the file.
        stage: Index of the model chunk (virtual pipeline stage).
        micro_step: Micro-batch of the step, or ``None`` for kinds without that column.
        shape: Sizes of its dimensions.
        dtype: Its dtype, as the framework prints it.
        features: Names of its numbers when they are other ones than the run's statistics; the same for all rows of a kind.
    """

    kind: str
    name: str
    stage: int
    micro_step: int | None
    shape: tuple[int, ...]
    dtype: str
    features: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether the tensor has no elements."""
        return 0 in self.shape

    @property
    def is_histogram(self) -> bool:
        """Whether its numbers are counts by bin, which belong in a picture and in no table."""
        return bool(self.features) and self.kind.endswith(HISTOGRAM)


class PendingNumbers(Protocol):
    """Numbers that a device may still be computing or copying."""

    def ready(self) -> bool:
        """Whether they have been computed and copied, without waiting for it."""

    def wait(self) -> NDArray[np.float64]:
        """Block until they are on the host. Called on the writer thread only."""


@dataclass(frozen=True)
class StepTable:
    """Everything recorded in one training step of one model.

    Attributes:
        model: Label of the model; empty when it is the only one.
        step: Number of the training step.
        rows: What each line of ``numbers`` is about, in order of execution.
        numbers: Flat float64, row after row: the configured statistics in their order, or the row's ``features``.
        extras: ``[len(extra_names)]`` float64: numbers about the step itself.
        extra_names: Their names: ``grad_scale``, ``found_inf``.
        micro_steps: How many backward passes reached the model in this step; ``None`` when nothing counted them.
        skipped: Whether the optimizer step was skipped; a fused optimizer says so through ``found_inf``.
        complete: False for the step that a crash or the end of the run cut short.
        supplement: Whether these are further rows of a step whose table has gone already.
        first: How many rows of the step have gone before.
    """

    model: str
    step: int
    rows: list[Row]
    numbers: PendingNumbers
    extras: PendingNumbers
    extra_names: list[str] = field(default_factory=list)
    micro_steps: int | None = None
    skipped: bool = False
    complete: bool = True
    supplement: bool = False
    first: int = 0
