"""Taps: where tensors are seen. One file a kind of data."""
