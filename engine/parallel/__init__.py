"""The processes of tensor and pipeline parallelism: driver, workers, and their messages.

How a layer is divided among the ranks is in `layers/parallel.py` and `models/sharding.py`.
"""
