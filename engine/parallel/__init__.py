"""Tensor and pipeline parallelism: the ranks and stages that run one model together."""
