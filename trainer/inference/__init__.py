"""A model folder as transformers opens it, to answer or to score; no training."""
