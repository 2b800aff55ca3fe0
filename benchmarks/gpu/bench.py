"""Kernels and a model beside their limits and peers on this machine's GPU: ``make gpu-bench``.

Ends in a table and a JSON file; each part runs in a separate process, alone on the GPU. A call
takes at most nine minutes, and ``--rest`` runs the parts that are left.
"""

from __future__ import annotations

import sys

from .parts import Part
from .verb import run_verb

_HERE = "baton.benchmarks.gpu"
PARTS = (
    Part("compile", f"{_HERE}.compiling:compiling", 60),
    Part("ceilings", f"{_HERE}.probes:probes", 60),
    Part("sweep", f"{_HERE}.sweep:sweep", 400),
    Part("blocks", f"{_HERE}.bench_blocks:moving", 60),
    Part("decode", f"{_HERE}.bench_attention:decoding", 120),
    Part("prefill", f"{_HERE}.bench_attention:prefilling", 60),
    Part("rows", f"{_HERE}.bench_rows:rows", 60),
    Part("draw", f"{_HERE}.bench_rows:drawing", 90),
    Part("products", f"{_HERE}.bench_rows:products", 90),
    Part("fp8", f"{_HERE}.bench_rows:fp8_products", 60),
    Part("model", f"{_HERE}.bench_model:model", 200),
    Part("int8", f"{_HERE}.bench_model:int8", 150),
    Part("cluster", f"{_HERE}.bench_cluster:cluster", 150),
    Part("colocated", f"{_HERE}.bench_modes:colocated", 170),
    Part("disaggregated", f"{_HERE}.bench_modes:disaggregated", 170),
    Part("adaptive", f"{_HERE}.bench_modes:adaptive", 170),
    Part("transformers", f"{_HERE}.bench_model:transformers", 300),
)


if __name__ == "__main__":
    sys.exit(run_verb("gpu-bench", PARTS, __doc__ or ""))
