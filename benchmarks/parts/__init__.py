"""The parts of `benchmarks/levers.py`: one file per part, with its cases and their variants."""
