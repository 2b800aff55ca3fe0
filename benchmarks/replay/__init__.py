"""Recorded traffic against a modelled cluster on a simulated clock, to judge autoscaling."""
