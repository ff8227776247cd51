"""Several engines behind one server: the client, the router, and replicas on a Ray cluster."""
