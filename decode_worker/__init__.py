"""The decode worker process: receives contexts and generates."""
