"""What `benchmarks/levers.py` measures: a file a part, each with its cases and their variants."""
