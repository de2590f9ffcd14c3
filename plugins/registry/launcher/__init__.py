"""Tracking and the model registry: MLflow's, in a store that one process at a time writes."""
