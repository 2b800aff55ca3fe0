"""Modelled clusters on a simulated clock: which mode and split recorded traffic needs."""
