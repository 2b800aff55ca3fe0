"""The HTTP gateway: OpenAI-compatible routes in, the native client protocol to the routers out.

A gateway keeps no state that outlives its connections. Several gateways serve one cluster side by
side, and a request that a gateway has started survives the death of a router or a worker as every
request of the native client does.
"""
