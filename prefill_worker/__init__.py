"""The prefill worker process: computes the KV of prompts and hands it to decode workers."""
