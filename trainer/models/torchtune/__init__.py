"""torchtune's model builders as a source of models."""
