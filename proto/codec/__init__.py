"""The public codec: contexts and other declared types as msgpack, arrays as maps."""
