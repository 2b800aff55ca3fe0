"""``baton gateway``: serve a running cluster over HTTP, with OpenAI's routes."""

from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path

from ..client import Client
from ..gateway.config import GatewayConfig
from ..proto.errors import ConfigError
from ..runtime.process.log import configure
from .cluster import add_address, addresses_of, keys_of
from .numbers import count

KEY_VARIABLE = "BATON_API_KEY"
EPILOG = """\
Clients of OpenAI work unchanged: base_url is the printed address, and any model name that
/v1/models lists. An address that other machines reach requires an API key.
"""


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = verbs.add_parser(
        "gateway", help="serve a running cluster over HTTP (OpenAI's routes)", epilog=EPILOG
    )
    add_address(parser, timeout=60.0)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at [127.0.0.1]")
    parser.add_argument(
        "--http-port", type=count, default=8000, metavar="N", help="port; 0 chooses one [8000]"
    )
    parser.add_argument(
        "--served-model-name",
        metavar="NAME",
        action="append",
        help="name of the model in requests and answers; may be repeated [the model's folder]",
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"key that requests must have; better {KEY_VARIABLE} or a file, because other users "
        "of the machine see the command line",
    )
    parser.add_argument("--api-key-file", metavar="FILE", help="file with one key per line")
    parser.add_argument("--ssl-certfile", metavar="FILE", default="", help="certificate for HTTPS")
    parser.add_argument("--ssl-keyfile", metavar="FILE", default="", help="its private key")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Wait for the cluster, print the address, and serve until interrupted."""
    from ..gateway.server import serve  # uvicorn takes long to import, and --help needs it not

    routers, keys = addresses_of(arguments), keys_of(arguments)
    config = GatewayConfig(
        routers=routers,
        host=arguments.host,
        port=arguments.http_port,
        model_names=tuple(arguments.served_model_name or ()),
        api_keys=api_key_digests(arguments),
        keys=keys,
        ssl_certfile=arguments.ssl_certfile,
        ssl_keyfile=arguments.ssl_keyfile,
    )
    with Client(routers, keys=keys, connect_timeout=arguments.timeout) as client:
        client.describe()  # a wrong address shall be an error here, not in every answer
    configure("gateway", "gateway", human=True, level="warning")
    return serve(config, on_listening=announce)


def api_key_digests(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return the digests of the API keys of the flags and the environment. Raises ConfigError."""
    keys = [arguments.api_key, os.environ.get(KEY_VARIABLE)]
    if arguments.api_key_file:
        try:
            keys += Path(arguments.api_key_file).read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file {arguments.api_key_file}: {error}") from None
    stripped = [key.strip() for key in keys if key and key.strip()]
    for key in stripped:
        if not key.isascii() or not key.isprintable():
            raise ConfigError("API keys must be printable ASCII")
    return tuple(dict.fromkeys(hashlib.sha256(key.encode()).hexdigest() for key in stripped))


def announce(url: str, model: str, keyed: bool) -> None:
    """Print where the gateway listens, and a command to try."""
    key = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if keyed else ""
    body = '{"messages": [{"role": "user", "content": "Who are you?"}]}'
    print(f"serving {model} at {url}", flush=True)
    print(f"try: curl {url}/chat/completions{key} -d '{body}'", flush=True)
