"""What a short job finds out about nodes: files, clock, Python, GPUs, network, local disk."""
