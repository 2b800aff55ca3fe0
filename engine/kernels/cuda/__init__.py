"""The CUDA kernels: checking launchers, their device, and the NumPy definition of each kernel.

Importing this package needs neither CuPy nor a GPU; nothing on the CPU's path imports it.
"""
