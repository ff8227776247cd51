"""The engine's inner parts: input and output processing, deadlines, recovery, and their locks."""
