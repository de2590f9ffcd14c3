"""Checkpoints, weights and the export."""
