"""Transport between processes: shared memory, collectives, connections, and how they end."""
