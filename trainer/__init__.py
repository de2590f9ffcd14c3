"""Fine-tuning that torchrun starts: the kit's own loop over models of several sources."""
