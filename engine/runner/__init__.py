"""Runs scheduled steps: batch arrays, model launches, CUDA graphs, and sampling."""
