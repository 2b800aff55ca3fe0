"""The CUDA kernels: launchers with argument checks, devices, and NumPy definitions of the kernels.

Importing this package needs neither CuPy nor a GPU. Code for the CPU never imports it.
"""
