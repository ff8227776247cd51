"""`engine bench serve`: load on a server that speaks OpenAI's protocol, and how it answered.

`command` reads the options, `workload` makes the requests, `driver` deals them to worker processes
(`worker`, `connection`, `http_reader`), `figures` and `plot` show what came back.
"""
