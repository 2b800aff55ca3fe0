"""JSON schemas as constraints on tokens, tried in a helper process before they are compiled."""
