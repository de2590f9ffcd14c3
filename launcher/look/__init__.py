"""Looking at runs: their state, logs, curves and results."""
