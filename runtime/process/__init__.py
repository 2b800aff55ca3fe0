"""A process of the cluster: settings, logging, threads, operating system, exit code."""
