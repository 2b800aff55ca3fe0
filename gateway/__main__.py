"""``python -m baton.gateway --config FILE``: run one gateway until a stop signal."""

from __future__ import annotations

import gc
import sys

if __name__ == "__main__":
    gc.disable()  # until baton.runtime.process.garbage.end_of_imports

from baton.runtime.process.main import run_process

from .config import GatewayConfig
from .server import serve


def main() -> int:
    """Entry point."""
    return run_process("gateway", GatewayConfig, serve)


if __name__ == "__main__":
    sys.exit(main())
