"""``baton.LLM``: a local cluster for one Python program, which answers lists of prompts."""
