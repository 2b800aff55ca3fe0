"""The prefill worker process: encodes contexts and hands them over."""
