"""Model architectures, built on the kernels of a Backend."""
