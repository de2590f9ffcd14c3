"""Configs of other trainers as recipes: a table per trainer says what each key becomes."""
