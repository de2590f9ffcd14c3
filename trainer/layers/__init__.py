"""Layers: attention, linear layers with adapters, NF4, fp8, the loss."""
