"""Communication between processes: shared memory, collectives, TCP, and process lifetimes."""
