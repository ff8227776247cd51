"""The scheduler: request queues, step budgets and preemption, in integers only."""
