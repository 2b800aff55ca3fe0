"""The scenes and the training of the demo Flux model in ``deploy/demo_flux``."""
