"""`engine bench serve`: load generator for OpenAI-compatible servers.

`command` parses the options, `workload` generates the requests, `driver` distributes them to worker
processes (`worker`, `connection`, `http_reader`), and `figures` and `plot` present the results.
"""
