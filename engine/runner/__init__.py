"""A scheduled step as flat arrays, the launches of the model and its CUDA graphs, and sampling."""
