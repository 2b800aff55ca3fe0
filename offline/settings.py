"""The settings of :class:`.llm.LLM` by name, for editors and type checkers."""

from __future__ import annotations

from os import PathLike
from typing import TypedDict


class ClusterSettings(TypedDict, total=False):
    """Settings of ``baton serve`` that an ``LLM`` takes; ``baton serve --help`` describes them.

    A test compares them with :class:`~baton.deploy.config.ServeSettings`.
    """

    task: str
    routers: int
    gateways: int
    http_host: str
    http_port: int
    served_model_name: str
    api_key_file: str
    ssl_certfile: str
    ssl_keyfile: str
    tool_call_parser: str
    reasoning_parser: str
    image_hosts: str
    allowed_hosts: str
    allowed_origins: str
    strict_parameters: str
    mode: str
    workers: int
    enforce_disaggregation: str
    prefill_min: int
    prefill_max: int
    decode_min: int
    decode_max: int
    workers_max: int
    autoscale: str
    slo_ttft: float
    slo_itl: float
    stabilization_window: float
    transport: str
    handoff: str
    policy: str
    decider: str
    prefill_order: str
    metric: str
    labels: str
    kv_transport: str
    model_family: str
    kv_events: str
    kv_events_topic: str
    extensions: str
    block_size: int
    kv_type: str
    kv_blocks: int
    kv_memory: str
    max_num_batched_tokens: int
    step_time: float
    max_num_seqs: int
    prefill_block_size: int
    prefill_kv_type: str
    prefill_kv_blocks: int
    prefill_kv_memory: str
    prefill_max_num_seqs: int
    decode_block_size: int
    decode_kv_type: str
    decode_kv_blocks: int
    decode_kv_memory: str
    picture_memory: str
    gpu_memory_utilization: float
    decode_max_num_batched_tokens: int
    max_model_len: int
    device: str
    device_ids: str
    kernels: str
    share_weights: str
    threads: int
    prefill_threads: int
    decode_threads: int
    grace: float
    worker_timeout: float
    handoff_timeout: float
    stats_interval: float
    trace_requests: int
    otlp_endpoint: str
    log_level: str
    log_format: str
    metrics_port: int
    metrics_host: str
    metrics_compat: str
    run_dir: str
    keys: str | PathLike[str]
    admin: str
