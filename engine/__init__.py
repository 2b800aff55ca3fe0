"""What a worker computes with: kernels, paged cache, models, scheduler, sampler."""
