"""The voice, the codec and the training of the speech model in ``deploy/demo_speech``."""
