"""The texts, pictures and training of the demo models in ``deploy/``, for text and for images."""
