"""Layers of a decoder: weights and the ops that use them; parallel layers in `parallel.py`."""
