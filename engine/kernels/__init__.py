"""The kernels of all devices, with one Backend protocol."""
