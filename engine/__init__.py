"""The engine of a worker: kernels, paged cache, models, scheduler, sampler."""
