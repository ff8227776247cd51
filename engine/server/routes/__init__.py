"""HTTP endpoints: one module per endpoint family, each with a `routes()` function."""
