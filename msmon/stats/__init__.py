"""What each statistic means. Implementations that run on tensors live behind the kernel seam of a backend."""
