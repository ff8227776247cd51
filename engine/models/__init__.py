"""The decoder, and the declarations of the model families that configure it."""
