"""The paged KV cache: blocks of a pool, prefixes shared between requests, block tables."""
