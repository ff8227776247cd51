"""Requests and responses of the protocols, as msgspec structs with field checks."""
