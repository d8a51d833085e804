"""Implementations of the kernel seam (:class:`msmon.backends.base.Kernel`)."""
