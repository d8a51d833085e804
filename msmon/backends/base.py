"""What the core asks of a tensor framework, and what the PyTorch backend asks of a training framework."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from msmon.stats.definitions import Statistic

TensorT = TypeVar("TensorT")
ModuleT_contra = TypeVar("ModuleT_contra", contravariant=True)
OptimizerT_contra = TypeVar("OptimizerT_contra", contravariant=True)


class Kernel(Protocol[TensorT]):
    """Reduces tensors to a few numbers each, on their own device, without waiting for it.

    Implementations differ in speed only: each agrees with :mod:`msmon.stats.oracle` on every dtype and layout.
    """

    def reduce(
        self,
        tensors: Sequence[TensorT],
        statistics: Sequence[Statistic],
        eps: float,
        *,
        divisor: TensorT | None = None,
    ) -> TensorT:
        """Statistics of each tensor.

        Args:
            tensors: Any dtype and layout, all on one device. They are only read.
            statistics: Which, in the order of the columns.
            eps: Threshold of ``zeros``.
            divisor: A 0-d tensor; statistics are those of ``tensor / divisor`` (gradients of a scaled loss).

        Returns:
            ``[len(tensors), len(statistics)]`` float64 (float32 where the device has no float64) on that device;
            NaN where there is no value.

        Raises:
            UnsupportedTensorError: A tensor has no elements to read (meta, fake).
        """


class UnsupportedTensorError(TypeError):
    """A tensor that has no statistics."""


class NamedParameter(NamedTuple, Generic[TensorT]):
    """A parameter under the name of its row.

    Attributes:
        name: Wrapper prefixes stripped.
        raw_name: As the framework's own walk names it, wrapper prefixes included.
        parameter: The parameter.
    """

    name: str
    raw_name: str
    parameter: TensorT


class Adapter(Protocol[ModuleT_contra, OptimizerT_contra, TensorT]):
    """What one training framework does with parameters, gradients and optimizer state.

    The gradient before reduction is taken when autograd has accumulated it on this rank, before any communication; an
    adapter whose framework reduces earlier says so by its own tap (none does yet).
    """

    name: str

    def applies(self, models: Sequence[ModuleT_contra], optimizers: Sequence[OptimizerT_contra]) -> str:
        """Empty when this adapter understands the models and what trains them, else the reason why not."""

    def parameters(self, root: ModuleT_contra) -> Iterator[NamedParameter[TensorT]]:
        """Every parameter once, in the order of the framework's own walk."""

    def unreduced_gradient(self, parameter: TensorT) -> TensorT | None:
        """This rank's accumulated gradient, right after a backward pass reached the parameter."""

    def reduced_gradient(self, parameter: TensorT) -> TensorT | None:
        """The gradient that the optimizer will use; ``None`` when there is none this step."""

    def state(self, optimizer: OptimizerT_contra, parameter: TensorT) -> Iterator[tuple[str, TensorT]]:
        """Optimizer state tensors of a parameter, by key."""

    def describe(self, root: ModuleT_contra) -> dict[str, Any]:
        """For ``run.json``: how the framework has wrapped the model."""
