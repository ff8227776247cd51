"""Attention models that screen superconductors, on arrays and the engine's ops.

`elements` and `data` hold facts and tables, `network` the model with its gradient and Adam,
`compositions` and `crystals` what it reads, `neighbours` the nearest known compositions,
`inference` and `screen` the fast pass over candidates, `study` the comparison with baselines, and
`figures` the pictures. `examples/screen_superconductors.py` walks through them.
"""
