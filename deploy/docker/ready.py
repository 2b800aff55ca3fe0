"""Health check of the container: exit code 0 if the gateway's ``/ready`` answers 200, else 1.

``/ready`` needs no API key. Needs the standard library only.
"""

from __future__ import annotations

import http.client
import os
import sys

TIMEOUT_S = 4.0


def main() -> int:
    """Ask once."""
    port = int(os.environ.get("BATON_HTTP_PORT", "8000"))
    gateway = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        gateway.request("GET", "/ready")
        status = gateway.getresponse().status
    except (OSError, http.client.HTTPException) as problem:
        sys.stdout.write(f"not ready: {problem}\n")
        return 1
    finally:
        gateway.close()
    sys.stdout.write(f"/ready: {status}\n")
    return 0 if status == 200 else 1


if __name__ == "__main__":
    sys.exit(main())
