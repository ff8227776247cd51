"""The decoder, and the plan of layers of each family of models."""
