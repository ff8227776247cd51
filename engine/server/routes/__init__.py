"""The HTTP endpoints: one module per family, with a function `routes()`."""
