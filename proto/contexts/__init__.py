"""The contexts of requests and what belongs to them: tokens, images, batches, outputs."""
