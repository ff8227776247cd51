"""The engine's step around the model: input checks, resolved options, outputs, recovery, statistics."""
