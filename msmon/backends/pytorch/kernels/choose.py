"""Chooses kernels: the only file that knows all of them, and says why one is not used."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.utils._python_dispatch import _disable_current_modes

from msmon import log
from msmon.backends.pytorch.kernels.eager import EagerKernel
from msmon.backends.pytorch.kernels.host import HostKernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from msmon.backends.base import Kernel
    from msmon.stats.definitions import Statistic


class KernelByDevice:
    """One kernel for tensors in host memory, another for those of accelerators.

    Args:
        host: For CPU tensors.
        device: For all others.
    """

    def __init__(self, host: Kernel[Tensor], device: Kernel[Tensor]) -> None:
        self.host = host
        self.device = device

    def reduce(
        self, tensors: Sequence[Tensor], statistics: Sequence[Statistic], eps: float, *, divisor: Tensor | None = None
    ) -> Tensor:
        """See :meth:`msmon.backends.base.Kernel.reduce`."""
        kernel = self.host if not tensors or tensors[0].device.type == "cpu" else self.device
        return kernel.reduce(tensors, statistics, eps, divisor=divisor)


def choose_kernel() -> KernelByDevice:
    """The fastest kernels that work here."""
    eager = EagerKernel()
    try:
        with _disable_current_modes():  # under a fake mode no tensor has numbers
            torch.zeros(1, device="cpu").numpy()
    except RuntimeError as error:  # torch built against another NumPy than the one installed
        log.say(f"torch and numpy do not fit together ({error}): slower statistics on CPU", once="kernel:host")
        return KernelByDevice(eager, eager)
    return KernelByDevice(HostKernel(), eager)
