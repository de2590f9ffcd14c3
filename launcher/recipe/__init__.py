"""Recipes: reading, extending, overriding, interpolating and validating them."""
