"""The training methods: base.py says what one is, every other file is one."""
