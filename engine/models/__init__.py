"""The decoder, the model families that configure it, and its sharding over ranks."""
