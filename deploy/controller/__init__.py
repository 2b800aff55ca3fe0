"""A cluster's controller: members, pools, drains, rollouts, and the operators' socket."""
