"""What prefill and decode workers share: their base core, membership, router links, events."""
