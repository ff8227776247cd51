"""Request and response bodies of both protocols, as validated msgspec structs."""
