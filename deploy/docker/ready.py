"""Health check of the container: exit code 0 if the gateway's ``/ready`` answers 200, else 1.

Sends the first key of the file that BATON_API_KEY_FILE names. Needs the standard library only.
"""

from __future__ import annotations

import http.client
import os
import sys
from pathlib import Path

TIMEOUT_S = 4.0


def main() -> int:
    """Ask once."""
    port = int(os.environ.get("BATON_HTTP_PORT", "8000"))
    file = os.environ.get("BATON_API_KEY_FILE", "")
    headers = {}
    gateway = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        if file:
            keys = Path(file).read_text().split()
            headers["Authorization"] = f"Bearer {keys[0] if keys else ''}"
        gateway.request("GET", "/ready", headers=headers)
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
