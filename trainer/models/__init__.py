"""The models that can be trained, by source."""
