"""The endpoints, one module for each family; each has `routes()`."""
