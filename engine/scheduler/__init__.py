"""Requests, budgets and preemption: the choice of what each step computes, in integers only."""
