"""PyTorch: taps, kernels, adapters and the session that holds them together."""
