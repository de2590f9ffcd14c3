"""The steps of a data recipe. Each takes rows and returns rows, and records which it removed."""
