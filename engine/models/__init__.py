"""Model architectures over the Backend kernels."""
