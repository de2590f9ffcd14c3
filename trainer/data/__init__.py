"""Tokens, packing and batches."""
