# Signatures of the C extension; csrc/cpu_module.c checks the arguments.

from collections.abc import Callable

from .backend import F32, I32, I64, U8, Weights

def instruction_sets() -> list[tuple[int, str, int, int]]: ...
def note_packed(nbytes: int, /) -> None: ...
def start_threads(threads: int, /) -> int: ...
def pack(isa: int, part: Weights, panels: U8, bf16: int, start: int, /) -> None: ...
def linear(isa: int, x: F32, panels: U8, bf16: int, bias: F32 | None, out: F32, /) -> None: ...
def quantized_kinds() -> list[tuple[str, int, int, int, int]]: ...
def pack_quantized(kind: int, blocks: U8, panels: U8, start: int, /) -> None: ...
def quantized_linear(
    isa: int,
    kind: int,
    x: F32,
    panels: U8,
    bias: F32 | None,
    out: F32,
    first: int,
    columns: int,
    /,
) -> None: ...
def embed_quantized(ids: I32, kind: int, blocks: U8, out: F32, /) -> None: ...
def gated_mlp(
    isa: int,
    x: F32,
    gate_up: U8,
    gate_up_bias: F32 | None,
    width: int,
    down: U8,
    down_bias: F32 | None,
    out: F32,
    /,
) -> bool: ...
def embed(ids: I32, table: Weights, bf16: int, out: F32, /) -> None: ...
def rms_norm(
    isa: int, x: F32, residual: F32 | None, weight: F32, eps: float, out: F32, /
) -> None: ...
def silu_mul(isa: int, gate_up: F32, out: F32, /) -> None: ...
def layer_norm(
    isa: int, x: F32, residual: F32 | None, weight: F32, bias: F32, eps: float, out: F32, /
) -> None: ...
def gelu(isa: int, x: F32, out: F32, /) -> None: ...
def convolve(isa: int, x: F32, panels: U8, bf16: int, bias: F32 | None, out: F32, /) -> None: ...
def snake(isa: int, x: F32, residual: F32 | None, scales: F32, out: F32, /) -> None: ...
def depthwise(
    isa: int,
    x: F32,
    weight: F32,
    bias: F32,
    dilation: int,
    scales: F32 | None,
    out: F32,
    /,
) -> None: ...
def soft_clip(isa: int, x: F32, out: F32, /) -> None: ...
def activate(isa: int, kind: int, x: F32, out: F32, /) -> None: ...
def add_scaled(isa: int, x: F32, scale: F32, residual: F32, /) -> None: ...
def group_norm(
    isa: int,
    x: F32,
    groups: int,
    weight: F32,
    bias: F32,
    eps: float,
    silu: bool,
    out: F32,
    after_part: Callable[[], object] | None,
    /,
) -> None: ...
def dense_attention(
    isa: int,
    q: F32,
    kv: F32,
    bias: F32 | None,
    scale: float,
    out: F32,
    after_part: Callable[[], object] | None,
    /,
) -> None: ...
def rope_append(
    isa: int,
    qkv: F32,
    positions: I32,
    slots: I64,
    cos_sin: F32,
    q_norm: F32 | None,
    k_norm: F32 | None,
    eps: float,
    kv_layer: F32,
    q_out: F32,
    rounding: int,
    /,
) -> None: ...
def attention(
    isa: int,
    q: F32,
    kv_layer: F32,
    block_tables: I32,
    row_offsets: I32,
    positions: I32,
    scale: float,
    window: int,
    out: F32,
    halves: bool,
    /,
) -> None: ...
def gather(
    isa: int, pool: F32, layer_start: int, layer_count: int, block_ids: I32, out: U8, /
) -> int | None: ...
def scatter(
    isa: int, pool: F32, layer_start: int, layer_count: int, block_ids: I32, payload: U8, /
) -> int | None: ...
def convert_blocks(
    isa: int,
    source: F32,
    target: F32,
    source_layer: int,
    source_layers: int,
    target_layer: int,
    target_layers: int,
    source_ids: I32,
    target_ids: I32,
    first: int,
    /,
) -> None: ...
def copy_blocks(
    isa: int,
    source: F32,
    target: F32,
    layer_start: int,
    layer_count: int,
    source_ids: I32,
    target_ids: I32,
    /,
) -> int | None: ...
def sum_blocks(
    isa: int, pool: F32, layer_start: int, layer_count: int, block_ids: I32, /
) -> int | None: ...
def checksum(isa: int, payload: U8, /) -> int | None: ...
def payload_digest(isa: int, payload: U8, /) -> int | None: ...
def draw(isa: int, weights: F32, top_p: float, min_p: float, uniform: float, /) -> int: ...
