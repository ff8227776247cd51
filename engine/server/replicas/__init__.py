"""Data parallelism: client and router for several replicas, and replicas on a Ray cluster."""
