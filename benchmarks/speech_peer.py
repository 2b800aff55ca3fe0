"""The SNAC codec of the snac package; run by a Python that has torch and snac, without Baton.

``python speech_peer.py FOLDER`` reads the codec's folder and answers each line of standard input,
a number of frames, with the seconds of one decoding, until the input ends.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import snac
import torch


def main() -> None:
    """Answer until the input ends."""
    torch.set_num_threads(1)
    config = json.loads((Path(sys.argv[1]) / "config.json").read_text())
    codec: Any = snac.SNAC(**config).eval()  # speed does not depend on the weights
    print(sum(parameter.numel() for parameter in codec.parameters()), flush=True)
    with torch.inference_mode():
        for line in sys.stdin:
            entries = [
                torch.randint(
                    0, config["codebook_size"], (1, int(line) * config["vq_strides"][0] // s)
                )
                for s in config["vq_strides"]
            ]
            began = time.process_time()
            codec.decode(entries)
            print(time.process_time() - began, flush=True)


if __name__ == "__main__":
    main()
