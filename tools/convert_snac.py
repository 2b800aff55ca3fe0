"""Convert a SNAC folder's pytorch_model.bin to model.safetensors, which Baton reads.

Usage: ``python tools/convert_snac.py FOLDER``. Needs torch and safetensors, on any machine;
Baton itself needs neither. Torch reads the file with ``weights_only=True``, so that the pickle
in it cannot run code.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> int:
    """Write ``model.safetensors`` beside ``pytorch_model.bin``."""
    if len(sys.argv) != 2:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    import torch
    from safetensors.torch import save_file

    folder = Path(sys.argv[1])
    state = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    tensors = {name: tensor.float().contiguous().clone() for name, tensor in state.items()}
    save_file(tensors, folder / "model.safetensors")
    sys.stdout.write(f"{folder / 'model.safetensors'}: {len(tensors)} tensors\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
