"""The kernels for AMX on processors without it: their sources with computed instructions."""
