"""Evaluation of finished models: samples, answers, scores, and what they say together."""
