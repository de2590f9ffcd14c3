"""The cookbook command: renders, submits and follows fine-tuning runs on a Slurm cluster."""

__version__ = "0.2.0"
