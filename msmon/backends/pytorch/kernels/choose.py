"""Chooses kernels: the only file that knows all of them, and says why one is not used."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch

from msmon import log
from msmon.backends.pytorch.devices import accumulation_dtype
from msmon.backends.pytorch.internals import unseen
from msmon.backends.pytorch.kernels.eager import EagerKernel
from msmon.backends.pytorch.kernels.host import HostKernel
from msmon.runtime.interruption import from_signal_handler
from msmon.stats.definitions import Statistic

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from msmon.backends.base import Kernel


class KernelByDevice:
    """A kernel for each type of device, chosen at its first tensor: compiling one may take a moment.

    Args:
        fastest: Chooses, by a tensor.
        few: For CPU tensors until there is one that is more than a number.
    """

    def __init__(self, fastest: Callable[[Tensor], Kernel[Tensor]], few: Kernel[Tensor]) -> None:
        self._fastest = fastest
        self._few = few
        self._chosen: dict[str, Kernel[Tensor]] = {}

    def reduce(
        self, tensors: Sequence[Tensor], statistics: Sequence[Statistic], eps: float, *, divisor: Tensor | None = None
    ) -> Tensor:
        """See :meth:`msmon.backends.base.Kernel.reduce`."""
        device = tensors[0].device.type if tensors else "cpu"
        kernel = self._chosen.get(device)
        if kernel is None:
            if device == "cpu" and not any(tensor.dim() for tensor in tensors):
                kernel = self._few
            else:
                kernel = self._chosen[device] = self._fastest(tensors[0])
        return kernel.reduce(tensors, statistics, eps, divisor=divisor)


def choose_kernel() -> KernelByDevice:
    """The fastest kernels that work here."""
    try:
        with unseen():  # under a fake mode no tensor has numbers
            torch.zeros(1, device="cpu").numpy()
    except RuntimeError as error:  # torch built against another NumPy than the one installed
        log.say(f"torch and numpy do not fit together ({error}): slower statistics on CPU", once="kernel:host")
        return KernelByDevice(
            lambda tensor: EagerKernel() if tensor.is_cpu else _of_device(tensor.device), EagerKernel()
        )
    return KernelByDevice(lambda tensor: _of_host() if tensor.is_cpu else _of_device(tensor.device), HostKernel())


def _of_host() -> Kernel[Tensor]:
    host = HostKernel()
    try:
        from msmon.backends.pytorch.kernels.fused import FusedKernel  # noqa: PLC0415 - an extra, only for CPU tensors

        return FusedKernel(host)
    except ModuleNotFoundError as error:
        reason = f"{error.name} is not installed: pip install msmon[cpu]"
    except Exception as error:
        if from_signal_handler(error):
            raise
        reason = f"{type(error).__name__}: {error}"
    log.say(f"slower statistics on CPU ({reason})", once="kernel:host")
    return host


def _of_device(device: torch.device) -> Kernel[Tensor]:
    eager = EagerKernel()
    if device.type not in {"cuda", "npu"}:
        return eager
    try:
        if device.type == "npu":
            _find_ascend()
        from msmon.backends.pytorch.kernels.device import DeviceKernel  # noqa: PLC0415 - Triton comes with torch for GPUs

        kernel = DeviceKernel(eager)
        _try_out(kernel, eager, device)
    except ModuleNotFoundError as error:
        reason = f"{error.name} is not installed"
    except Exception as error:
        if from_signal_handler(error):
            raise
        reason = f"Triton: {type(error).__name__}: {error}"
    else:
        return kernel
    log.say(f"slower statistics on {device.type} ({reason})", once=f"kernel:{device.type}")
    return eager


def _find_ascend() -> None:
    """Whether the Triton that is installed compiles for NPUs.

    Raises:
        ModuleNotFoundError: It does not.
    """
    import triton.backends  # noqa: PLC0415 - Triton is optional

    if "ascend" not in triton.backends.backends:
        raise ModuleNotFoundError(name="triton-ascend")


def _try_out(kernel: Kernel[Tensor], trusted: Kernel[Tensor], device: torch.device) -> None:
    """Compile what will be needed, and compare its results once, which waits for the device.

    Raises:
        RuntimeError: They differ.
    """
    numbers = torch.arange(-1000.0, 70000.0, 1.5, device=device)
    tensors = [numbers.to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    six = list(Statistic)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Triton's, about its own future
        found = kernel.reduce(tensors, six, 1e-8)
    wide = accumulation_dtype(device)
    tolerance = 1e-9 if wide is torch.float64 else 1e-5
    if not torch.allclose(found.to(wide), trusted.reduce(tensors, six, 1e-8), rtol=tolerance, equal_nan=True):
        raise RuntimeError("its results are wrong on this device")
