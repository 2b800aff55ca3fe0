"""The autoscaler: a pure policy for the pools' target sizes, and the metrics it uses."""
