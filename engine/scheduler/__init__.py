"""Chooses what each step computes: requests, budgets and preemption, in integers only."""
