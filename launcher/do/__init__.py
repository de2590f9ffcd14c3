"""What a command does from beginning to end: prepare, submit, resume, cancel."""
