"""The library for PyTorch: one import away from the original's."""

from __future__ import annotations

from msmon.backends.pytorch.monitor import TrainerMon

__all__ = ["TrainerMon"]
