"""The engine's step around the model: input checks, options, outputs, recovery, statistics."""
