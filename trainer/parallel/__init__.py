"""How ranks share a model: mesh, FSDP, tensor parallelism, activations."""
