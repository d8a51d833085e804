"""Chooses kernels: the only file that knows all of them, and says why one is not used."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from msmon import log
from msmon.backends.pytorch.kernels.eager import EagerKernel
from msmon.backends.pytorch.kernels.host import HostKernel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from msmon.backends.base import Kernel
    from msmon.stats.definitions import Statistic


class KernelByDevice:
    """One kernel for tensors in host memory, another for those of accelerators.

    Args:
        host: Makes that for CPU tensors, at the first tensor that is more than a number: it may take a moment.
        device: For all others.
        few: Until then for CPU tensors.
    """

    def __init__(self, host: Callable[[], Kernel[Tensor]], device: Kernel[Tensor], few: Kernel[Tensor]) -> None:
        self._make_host = host
        self._host: Kernel[Tensor] | None = None
        self._device = device
        self._few = few

    def reduce(
        self, tensors: Sequence[Tensor], statistics: Sequence[Statistic], eps: float, *, divisor: Tensor | None = None
    ) -> Tensor:
        """See :meth:`msmon.backends.base.Kernel.reduce`."""
        kernel = self._device
        if not tensors or tensors[0].device.type == "cpu":
            if self._host is None and any(tensor.dim() for tensor in tensors):
                self._host = self._make_host()
            kernel = self._host or self._few
        return kernel.reduce(tensors, statistics, eps, divisor=divisor)


def choose_kernel() -> KernelByDevice:
    """The fastest kernels that work here."""
    eager = EagerKernel()
    try:
        torch.zeros(1, device="cpu").numpy()
    except RuntimeError as error:  # torch built against another NumPy than the one installed
        log.say(f"torch and numpy do not fit together ({error}): slower statistics on CPU", once="kernel:host")
        return KernelByDevice(lambda: eager, eager, eager)
    return KernelByDevice(_fastest_host_kernel, eager, HostKernel())


def _fastest_host_kernel() -> Kernel[Tensor]:
    host = HostKernel()
    try:
        from msmon.backends.pytorch.kernels.fused import FusedKernel  # noqa: PLC0415 - an extra, only for CPU tensors

        return FusedKernel(host)
    except ModuleNotFoundError as error:
        reason = f"{error.name} is not installed; pip install msmon[cpu]"
    except Exception as error:  # noqa: BLE001 - whatever is wrong with a compiler, there is a kernel without one
        reason = f"the loop in one pass cannot be compiled: {type(error).__name__}: {error}"
    log.say(f"slower statistics on CPU ({reason})", once="kernel:host")
    return host
