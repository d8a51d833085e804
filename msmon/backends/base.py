"""What the core asks of a tensor framework, and what the PyTorch backend asks of a training framework."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from msmon.runtime.ledger import Ledger
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


Tell: TypeAlias = "Callable[[Callable[[], Iterable[tuple[TensorT, TensorT]]]], None]"
"""Takes what finds parameters with their gradients, and calls it, guarded, when somebody wants to know."""


class Adapter(Protocol[ModuleT_contra, OptimizerT_contra, TensorT]):
    """What one training framework does with parameters, gradients and optimizer state.

    Of a parameter that is spread over ranks, weight, reduced gradient and optimizer state are this rank's part; the gradient
    before reduction is whole where the framework makes it whole.
    """

    name: str
    keeps_gradients: bool
    """Whether a gradient stays on its parameter until an optimizer has used it: one that is gone was thrown away."""

    def applies(self, models: Sequence[ModuleT_contra], optimizers: Sequence[OptimizerT_contra]) -> str:
        """Empty when this adapter understands the models and what trains them, else the reason why not."""

    def parameters(self, root: ModuleT_contra) -> Iterator[NamedParameter[TensorT]]:
        """Every parameter once, in the order of the framework's own walk."""

    def accumulates(self, parameter: TensorT) -> bool:
        """Whether autograd leaves this rank's gradient on the parameter itself before any communication."""

    def tell_unreduced(self, ledger: Ledger, tell: Tell[TensorT]) -> None:
        """Of all other parameters: tell their gradients once those of a backward pass are there.

        Args:
            ledger: Takes the patches that this needs. Nothing in them may raise.
            tell: Told what finds the gradients. It does not raise, and keeps none.
        """

    def told_at_the_end(self, parameter: TensorT) -> bool:
        """Whether that tells the sum of all micro-batches, so that no single one needs to be read."""

    def unreduced_gradient(self, parameter: TensorT) -> TensorT | None:
        """This rank's accumulated gradient, right after a backward pass reached the parameter."""

    def weight(self, parameter: TensorT) -> TensorT | None:
        """What this rank holds of a parameter; ``None`` when that is nothing."""

    def reduced_gradient(self, parameter: TensorT) -> TensorT | None:
        """The gradient that the optimizer will use; ``None`` when there is none this step."""

    def state(self, optimizer: OptimizerT_contra, parameter: TensorT) -> Iterator[tuple[str, TensorT]]:
        """Optimizer state tensors of a parameter, by key."""

    def steps_taken(self, optimizer: OptimizerT_contra, parameter: TensorT) -> Any:  # noqa: ANN401 - as the optimizer keeps it
        """How often an optimizer has updated a parameter, a number or a tensor; ``None`` when it does not keep that there."""

    def param_groups(self, optimizer: OptimizerT_contra) -> Mapping[int, dict[str, Any]]:
        """The options that hold for each parameter of an optimizer, by the parameter's identity."""

    def place(self, parameter: TensorT) -> dict[str, Any]:
        """For ``run.json``: the shape of the whole and the place of this rank's part; empty for a whole parameter."""

    def describe(self, root: ModuleT_contra) -> dict[str, Any]:
        """For ``run.json``: how the framework has wrapped the model."""
