"""Run directories, the kit's only registry: make one, find one, judge its state."""
