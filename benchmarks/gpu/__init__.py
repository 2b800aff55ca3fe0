"""What is checked and measured on a GPU: ``make gpu-check`` and ``make gpu-bench``."""
