"""Commands of `engine`: modules with `add_arguments(parser)` and `run(arguments) -> int`."""
