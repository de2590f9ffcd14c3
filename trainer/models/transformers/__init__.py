"""transformers' own modelling code as a source of models."""
