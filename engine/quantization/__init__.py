"""The offline process that writes a model with weights of 8 or 4 bits."""
