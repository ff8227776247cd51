"""A scheduled step as flat arrays, and the model's launches with them."""
