"""Pictures from text: encoders, Flux transformer, sampler, VAE decoder and their pipeline."""
