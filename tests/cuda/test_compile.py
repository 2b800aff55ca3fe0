"""Every kernel compiles for every target: no spills, few registers, the instructions meant."""

from __future__ import annotations

import re

import pytest

from baton.engine.kernels.cuda import dependent
from baton.engine.kernels.cuda.cupy_device import cuda_source

from .gates import (
    COPY_16,
    COPY_ALWAYS,
    COPY_OR_ZERO,
    DEFAULT_TARGET,
    FORBIDDEN,
    GATES,
    HOPPER,
    PACK_BF16,
    TARGETS,
    TENSOR,
)
from .host.builder import CSRC, HERE
from .test_tuning import VARIANTS
from .toolkit import FIRST, CompileFailed, compile_source, disassembler, nvrtc_library

INCLUDE = '#include "device.cuh"'
SOURCES = sorted(path.name for path in CSRC.glob("*.cu"))


def targets_of(source):
    return ("sm_90a",) if source in HOPPER else TARGETS


CASES = [
    pytest.param(source, target, release, id=f"{source}-{target}-{release}")
    for release in ("newest", FIRST)
    for source in SOURCES
    for target in targets_of(source)
]

needs_toolkit = pytest.mark.skipif(
    nvrtc_library() is None or disassembler() is None,
    reason="the kernels are compiled by the wheels nvidia-cuda-nvrtc and nvidia-cuda-nvdisasm, "
    "which are not installed",
)


@needs_toolkit
@pytest.mark.parametrize(("source", "target", "release"), CASES)
def test_machine_code(source, target, release, build_cache):
    if nvrtc_library(release) is None:
        pytest.skip(f"NVRTC {release} is not installed: make test-cuda fetches it")
    broken = broken_gates(source, compile_source(cuda_source(source), target, build_cache, release))
    assert not broken, f"{target}:\n" + "\n".join(broken)


def broken_gates(source, compiled):
    """Say what of the kernels' machine code breaks their gates."""
    broken = []
    for name, kernel in compiled.items():
        gate = gate_of(source, name)
        if kernel.spill_bytes or kernel.stack_bytes:
            broken.append(f"{name}: {kernel.spill_bytes} B spilled, {kernel.stack_bytes} B stack")
        if not 0 < kernel.registers <= gate.registers:
            broken.append(f"{name}: {kernel.registers} registers, at most {gate.registers}")
        for pattern in gate.needs:
            if not any(re.fullmatch(pattern, opcode) for opcode in kernel.opcodes):
                broken.append(f"{name}: lacks {pattern}")
        for pattern in (*FORBIDDEN, *gate.forbids):
            hits = [opcode for opcode in kernel.opcodes if re.fullmatch(pattern, opcode)]
            broken += [f"{name}: has {opcode}" for opcode in hits]
    return broken


@needs_toolkit
@pytest.mark.parametrize(
    ("bug", "source", "target", "message"),
    [
        ("ROUND", "elementwise.cu", "sm_80", r"silu_mul: has F2FP\..*RZ"),
        ("ROUND", "elementwise.cu", "sm_90", r"silu_mul: has F2FP\..*RZ"),
        ("FILL", "decode_attention.cu", "sm_90", "decode_attention_d64: has LDGSTS"),
        ("FILL", "prefill_attention.cu", "sm_90", "prefill_attention_d128: has LDGSTS"),
        ("TRANSPOSE", "decode_attention.cu", "sm_90", "decode_attention_d128: lacks MOVM"),
    ],
)
def test_bugs_planted_in_ptx_break_a_gate(bug, source, target, message, build_cache):
    """The CPU runs other code in place of inline PTX."""
    text = f"#define BATON_PLANT_PTX_{bug}\n{cuda_source(source)}"
    broken = broken_gates(source, compile_source(text, target, build_cache))
    assert any(re.match(message, each) for each in broken), broken


@needs_toolkit
@pytest.mark.parametrize("release", ["newest", FIRST])
@pytest.mark.parametrize("tuning", VARIANTS)
def test_variants_that_a_sweep_may_choose_leave_no_value_to_memory(build_cache, tuning, release):
    if nvrtc_library(release) is None:
        pytest.skip(f"NVRTC {release} is not installed: make test-cuda fetches it")
    text = cuda_source("decode_attention.cu")
    for define in tuning.defines:
        text = f"#define {define.replace('=', ' ')}\n{text}"
    for name, kernel in compile_source(text, DEFAULT_TARGET, build_cache, release).items():
        assert not kernel.spill_bytes and not kernel.stack_bytes, name
        blocks = tuning.decode_bounds if "attention" in name else 1
        assert kernel.registers * 128 * blocks <= 65536, name


@needs_toolkit
@pytest.mark.parametrize(
    ("target", "release"), [("sm_90", "newest"), ("sm_90", FIRST), ("sm_120", "newest")]
)
@pytest.mark.parametrize("source", sorted(dependent.SOURCES))
def test_machine_code_of_kernels_that_may_begin_early(source, target, release, build_cache):
    """Each waits for the kernel before, before it reads or writes, and reads no constants."""
    if nvrtc_library(release) is None:
        pytest.skip(f"NVRTC {release} is not installed: make test-cuda fetches it")
    text = f"#define BATON_DEPENDENT 1\n{cuda_source(source)}"
    kernels = compile_source(text, target, build_cache, release)
    assert not broken_gates(source, kernels)
    for name, kernel in kernels.items():
        assert kernel.early == [], f"{name}: {kernel.early}"
        assert "PREEXIT" in kernel.opcodes, name
        constant = [each for each in kernel.opcodes if re.fullmatch(r"LDG.*\.CONSTANT.*", each)]
        assert not constant, f"{name}: {constant}"


EARLY = """
extern "C" __global__ void waits(float* x) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    x[threadIdx.x] += 1.0f;
}
extern "C" __global__ void reads(float* x) {
    const float y = x[threadIdx.x];
    asm volatile("griddepcontrol.wait;" ::: "memory");
    x[threadIdx.x] = y + 1.0f;
}
extern "C" __global__ void never(float* x) { x[threadIdx.x] = 1.0f; }
"""


@needs_toolkit
def test_accesses_before_the_wait_are_seen(build_cache):
    kernels = compile_source(EARLY, DEFAULT_TARGET, build_cache)
    assert kernels["waits"].early == []
    assert kernels["reads"].early == ["LDG.E"]
    assert kernels["never"].early is None


def gate_of(source, name):
    found = [gate for pattern, gate in GATES.get(source, {}).items() if re.fullmatch(pattern, name)]
    assert len(found) == 1, f"tests/cuda/gates.py has {len(found)} entries for {name} of {source}"
    return found[0]


@needs_toolkit
@pytest.mark.parametrize("source", SOURCES)
def test_every_gate_has_its_kernel(source, build_cache):
    target = "sm_90a" if source in HOPPER else DEFAULT_TARGET
    names = compile_source(cuda_source(source), target, build_cache)
    idle = [p for p in GATES.get(source, {}) if not any(re.fullmatch(p, n) for n in names)]
    assert names
    assert not idle


def test_gates_name_sources():
    assert set(GATES) == set(SOURCES)


SPILLS = """
extern "C" __global__ void __launch_bounds__(1024, 2) greedy(float* x, int n) {
    float keep[64];
    for (int i = 0; i < 64; i++) keep[i] = x[i * n];
    for (int r = 0; r < n; r++)
        for (int i = 0; i < 64; i++) keep[i] = keep[i] * keep[(i * 7 + 1) % 64] + x[r];
    for (int i = 0; i < 64; i++) x[i * n] = keep[i];
}
extern "C" __global__ void modest(float4* x) { x[threadIdx.x].x += 1.0f; }
"""


@needs_toolkit
def test_spills_stack_and_opcodes_are_seen(build_cache):
    kernels = compile_source(SPILLS, DEFAULT_TARGET, build_cache)
    assert kernels["greedy"].spill_bytes > 0
    assert kernels["greedy"].stack_bytes > 0
    assert any(opcode.startswith("STL") for opcode in kernels["greedy"].opcodes)
    assert kernels["modest"].spill_bytes == kernels["modest"].stack_bytes == 0
    assert "EXIT" in kernels["modest"].opcodes
    with pytest.raises(CompileFailed, match="identifier"):
        compile_source("__global__ void k() { nothing(); }", DEFAULT_TARGET, build_cache)


ROUNDS = """
extern "C" __global__ void nearest(unsigned* w, float a, float b) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w[0]) : "f"(a), "f"(b));
}
extern "C" __global__ void to_zero(unsigned* w, float a, float b) {
    asm("cvt.rz.bf16x2.f32 %0, %1, %2;" : "=r"(w[0]) : "f"(a), "f"(b));
}
extern "C" __global__ void copies(uint4* out, const uint4* in, unsigned bytes) {
    __shared__ uint4 held[32];
    const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(held + threadIdx.x));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(in) : "memory");
    asm volatile("cp.async.wait_all;" ::: "memory");
    out[threadIdx.x] = held[threadIdx.x];
}
extern "C" __global__ void copies_or_zeros(uint4* out, const uint4* in, int wanted) {
    __shared__ uint4 held[32];
    const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(held + threadIdx.x));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(to), "l"(in), "r"(wanted ? 16 : 0) : "memory");
    asm volatile("cp.async.wait_all;" ::: "memory");
    out[threadIdx.x] = held[threadIdx.x];
}
"""


@needs_toolkit
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_roundings_and_copies_that_the_cpu_cannot_tell_apart_are_seen(target, build_cache):
    kernels = compile_source(ROUNDS, target, build_cache)

    def has(name, pattern):
        return any(re.fullmatch(pattern, opcode) for opcode in kernels[name].opcodes)

    assert has("nearest", PACK_BF16)
    assert not has("to_zero", PACK_BF16)
    assert has("to_zero", FORBIDDEN[-1])
    assert not has("nearest", FORBIDDEN[-1])
    assert has("copies", COPY_ALWAYS)
    assert not has("copies", COPY_OR_ZERO)
    assert has("copies_or_zeros", COPY_OR_ZERO)
    assert not has("copies_or_zeros", COPY_ALWAYS)


@needs_toolkit
def test_the_probe_of_host_execution_is_cuda(build_cache):
    text = (HERE / "probe.cu").read_text().replace(INCLUDE, cuda_source("device.cuh"))
    kernels = compile_source(text, DEFAULT_TARGET, build_cache)
    assert {"shuffles", "tensor", "pipeline", "conversions"} < set(kernels)
    assert any(re.fullmatch(TENSOR, opcode) for opcode in kernels["tensor"].opcodes)
    assert any(re.fullmatch(COPY_16, opcode) for opcode in kernels["pipeline"].opcodes)


def test_headers_are_put_in_place_once():
    text = cuda_source("elementwise.cu")
    assert "#include" not in text
    assert text.count("typedef unsigned short bf16;") == 1
    lines = text.splitlines()
    start = lines.index('#line 1 "elementwise.cu"')
    again = max(i for i, line in enumerate(lines) if line.endswith('"elementwise.cu"'))
    assert again > start
    number = int(lines[again].split()[1])
    original = (CSRC / "elementwise.cu").read_text().splitlines()
    assert lines[again + 1] == original[number - 1]
