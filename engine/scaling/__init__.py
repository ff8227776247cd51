"""Predict a model's memory and speed on GPUs: step time from bytes, operations and launches."""

from engine.cards import CARDS, Card, find_card
from engine.scaling.constants import NCCL, OURS, Collective, Constants
from engine.scaling.division import Division, divisions
from engine.scaling.speed import Speed, Workload
from engine.scaling.step_time import Step, StepModel
from engine.scaling.terms import Terms

__all__ = ["CARDS", "NCCL", "OURS", "Card", "Collective", "Constants", "Division", "Speed", "Step"]
__all__ += ["StepModel", "Terms", "Workload", "divisions", "find_card"]
