"""Kernel sets of the devices, behind one Backend protocol."""
