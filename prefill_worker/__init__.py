"""The prefill worker process: hands the KV of prompts to decode workers, or embeds texts."""
