"""Fine-tuning that torchrun starts: own loops over torchtune's components."""
