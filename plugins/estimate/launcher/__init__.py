"""What a recipe needs and how fast it would be, computed."""
