"""The plan of a cluster: processes, addresses, memory and revisions."""
