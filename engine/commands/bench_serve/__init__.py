"""`engine bench serve`: load tests of servers that speak OpenAI's protocol.

`command` reads the options, `workload` generates the requests, `driver` distributes them to worker
processes (`worker`, `connection`, `http_reader`), `figures` and `plot` present the results.
"""
