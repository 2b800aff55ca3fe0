"""The texts and the training of the demo model in ``deploy/demo_model``."""
