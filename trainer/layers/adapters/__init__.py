"""Adapters: what a few parameters add to a frozen model. base.py says what a kind is."""
