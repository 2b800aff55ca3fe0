"""Images of prompts: from an encoded file to the pixels that a model's vision encoder takes."""
