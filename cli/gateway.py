"""``baton gateway``: serve a running cluster over HTTP, with OpenAI's routes."""

from __future__ import annotations

import argparse
import os

from baton.client import Client
from baton.gateway.chat_style import REASONING_PARSERS, TOOL_CALL_PARSERS
from baton.gateway.config import GatewayConfig
from baton.runtime.keys.api_keys import KEY_VARIABLE, api_key_digests
from baton.runtime.metrics.vllm import METRICS_COMPAT
from baton.runtime.process.log import configure

from .cluster import add_address, addresses_of, keys_of
from .numbers import count
from .output import say
from .parser import one_of, shown, warn

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
        help="name of the model in requests and answers, or several separated by commas; may be "
        "repeated [the model's folder]",
    )
    _add_access(parser)
    _add_answers(parser)
    parser.add_argument(
        "--otlp-endpoint",
        metavar="URL",
        help="OpenTelemetry collector (OTLP over HTTP) that gets the spans of requests; needs the "
        "extra otel (default: OTEL_EXPORTER_OTLP_ENDPOINT, else none)",
    )
    parser.add_argument(
        "--metrics-compat",
        type=one_of(METRICS_COMPAT[1:]),
        metavar=shown(METRICS_COMPAT[1:]),
        help="also export the metric names of vLLM at /metrics",
    )
    parser.set_defaults(run=run)


def _add_access(parser: argparse.ArgumentParser) -> None:
    """Add who may send requests, and from where images may come."""
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"key that requests must have; better {KEY_VARIABLE} or a file, because other users "
        "of the machine see the command line",
    )
    parser.add_argument("--api-key-file", metavar="FILE", help="file with one key per line")
    parser.add_argument("--ssl-certfile", metavar="FILE", default="", help="certificate for HTTPS")
    parser.add_argument("--ssl-keyfile", metavar="FILE", default="", help="its private key")
    parser.add_argument(
        "--image-hosts",
        metavar="HOST",
        action="append",
        help="host from which images of requests may be fetched: a name, or an address or network, "
        "which allows private addresses; may be repeated [none]",
    )
    parser.add_argument(
        "--allowed-hosts",
        metavar="HOST",
        action="append",
        help="name of this machine that requests without an API key may use besides localhost, "
        "such as host.docker.internal; may be repeated [none]",
    )
    parser.add_argument(
        "--allowed-origins",
        metavar="ORIGIN",
        action="append",
        help="origin of web pages that may send requests and read the answers (CORS), such as "
        "https://chat.example; * allows all, with an API key; may be repeated [none]",
    )


def _add_answers(parser: argparse.ArgumentParser) -> None:
    """Add how bodies and answers are read."""
    parser.add_argument(
        "--tool-call-parser",
        default="auto",
        choices=TOOL_CALL_PARSERS,
        help="how answers write tool calls; auto asks the chat template [auto]",
    )
    parser.add_argument(
        "--reasoning-parser",
        default="auto",
        choices=REASONING_PARSERS,
        help="split reasoning between <think> tags from the content; auto asks the template [auto]",
    )
    parser.add_argument(
        "--strict-parameters",
        action="store_true",
        help="refuse fields of requests that have no effect, and unknown ones, instead of naming "
        "them among the warnings of the response",
    )


def run(arguments: argparse.Namespace) -> int:
    """Wait for the cluster, print the address, and serve until interrupted."""
    from baton.gateway.server import serve  # uvicorn takes long to import, and --help needs it not

    routers, keys = addresses_of(arguments), keys_of(arguments)
    api_keys = (arguments.api_key, os.environ.get(KEY_VARIABLE))
    config = GatewayConfig(
        routers=routers,
        host=arguments.host,
        port=arguments.http_port,
        model_names=tuple(
            name.strip() for one in arguments.served_model_name or () for name in one.split(",")
        ),
        api_keys=api_key_digests(arguments.api_key_file or "", api_keys),
        metrics_compat=arguments.metrics_compat or "",
        keys=keys,
        ssl_certfile=arguments.ssl_certfile,
        ssl_keyfile=arguments.ssl_keyfile,
        otlp_endpoint=_collector(arguments),
        tool_call_parser=arguments.tool_call_parser,
        reasoning_parser=arguments.reasoning_parser,
        image_hosts=tuple(arguments.image_hosts or ()),
        allowed_hosts=tuple(arguments.allowed_hosts or ()),
        allowed_origins=tuple(arguments.allowed_origins or ()),
        strict_parameters=arguments.strict_parameters,
    )
    with Client(routers, keys=keys, connect_timeout=arguments.timeout) as client:
        client.describe()  # a wrong address shall be an error here, not in every answer
    configure("gateway", "gateway", human=True, level="warning")
    return serve(config, on_listening=announce)


def _collector(arguments: argparse.Namespace) -> str:
    """Return the URL of the OpenTelemetry collector, or an empty string."""
    from .settings import collector_of  # the import takes long, and --help needs it not

    if arguments.otlp_endpoint is None:
        return collector_of(os.environ, warn).get("otlp_endpoint", "")
    return str(arguments.otlp_endpoint)


def announce(url: str, model: str, keyed: bool) -> None:
    """Print where the gateway listens, and a command to try."""
    key = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if keyed else ""
    body = '{"messages": [{"role": "user", "content": "Who are you?"}]}'
    say(f"serving {model} at {url}")
    print(f"try: curl {url}/chat/completions{key} -d '{body}'", flush=True)
