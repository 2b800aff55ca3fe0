"""Model folders: configuration, tensors, and the pipeline made from them."""
