"""The roles of a cluster's processes."""

ROUTER, PREFILL, DECODE, GATEWAY = "router", "prefill", "decode", "gateway"
POOLS = (PREFILL, DECODE)
"""The roles whose number of members can change while the cluster runs."""
