import itertools

import pytest
from msgspec.structs import replace

from baton.cli import settings as settings_module
from baton.cli.settings import GROUPS, HELP, resolve
from baton.deploy.config import ServeSettings, parse_size
from baton.proto.errors import ConfigError


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "serve.toml"
    path.write_text('prefill = 3\ndecode = 4\nkv-memory = "64MiB"\n')
    return str(path)


def test_the_machine_sets_defaults_but_no_given_setting(file):
    def fill(settings, given):
        seen.append(set(given))
        return settings if "prefill" in given else replace(settings, prefill=2)

    seen = []
    assert resolve({}, {"BATON_BLOCK_SIZE": "8"}, None, fill=fill).prefill == 2
    assert resolve({"block_size": None}, {}, file, fill=fill).prefill == 3
    assert seen == [{"block_size"}, {"prefill", "decode", "kv_memory"}]


def test_defaults_alone():
    assert resolve({}, {}, None) == ServeSettings()


def test_flag_beats_environment_beats_file_beats_default(file):
    settings = resolve({"prefill": 7, "decode": None}, {"BATON_DECODE": "5", "HOME": "/"}, file)
    assert (settings.prefill, settings.decode, settings.kv_memory) == (7, 5, "64MiB")
    assert settings.block_size == ServeSettings().block_size


def test_opentelemetrys_variable_names_the_collector_if_its_packages_are_there(monkeypatch):
    given = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}
    warnings: list[str] = []
    monkeypatch.setattr(settings_module, "is_installed", lambda: False)
    assert resolve({}, given, None, warn=warnings.append).otlp_endpoint == ""
    (warning,) = warnings
    assert "baton-serve[otel]" in warning
    monkeypatch.setattr(settings_module, "is_installed", lambda: True)
    assert resolve({}, given, None).otlp_endpoint == "http://collector:4318"
    own = {"otlp_endpoint": "http://other:4318"}
    assert resolve(own, given, None).otlp_endpoint == "http://other:4318"
    with pytest.raises(ConfigError, match=r"--otlp-endpoint must begin with http://"):
        resolve({"otlp_endpoint": "collector:4318"}, given, None)


@pytest.mark.parametrize(
    ("flags", "environment", "content", "complaint"),
    [
        ({}, {"BATON_DECODE": "many"}, "", "BATON_DECODE is 'many', not a whole number"),
        ({}, {"BATON_DECODE": "0"}, "", "BATON_DECODE must be at least 1"),
        ({}, {}, "decod = 2", "FILE: decod is not a setting; did you mean decode?"),
        ({}, {}, "[zzz]\nx = 1", "FILE: zzz is not a setting; baton serve --help lists them"),
        ({}, {}, "decode = 'two'", "FILE: decode is 'two', not a whole number"),
        ({}, {}, "grace = 'long'", "FILE: grace is 'long', not a number"),
        ({}, {}, "decode = 0", "FILE: decode must be at least 1"),
        ({"decode": 0}, {"BATON_DECODE": "2"}, "decode = 3", "--decode must be at least 1"),
        ({"grace": -1.0}, {}, "", "--grace must not be negative"),
        ({"trace_requests": 10**6}, {}, "", "--trace-requests must be at most 100000"),
        (
            {},
            {"BATON_TRANSPORT": "pigeon"},
            "",
            "BATON_TRANSPORT must be one of ipc, tcp, not 'pigeon'",
        ),
        ({}, {"BATON_POLICY": "dice"}, "", "BATON_POLICY must be one of round_robin, "),
        (
            {"kv_type": "int4"},
            {},
            "",
            "--kv-type must be one of auto, float32, bfloat16, int8, not",
        ),
        ({"decode_block_size": -1}, {}, "", "--decode-block-size must not be negative"),
        (
            {"device": "cuda", "decode_kv_type": "int8"},
            {},
            "",
            "--decode-kv-type and --prefill-kv-type must be equal with device cuda",
        ),
        (
            {"device": "cuda", "kv_type": "float32"},
            {},
            "",
            "--kv-type must be auto, bfloat16 or int8 with device cuda",
        ),
        (
            {"device": "cuda"},
            {"BATON_PREFILL_BLOCK_SIZE": "8"},
            "",
            "BATON_PREFILL_BLOCK_SIZE needs device cpu; give BATON_BLOCK_SIZE",
        ),
        (
            {"kernels": "abacus"},
            {},
            "",
            "--kernels must be one of auto, cpu, cpu-floats, numpy, not 'abacus'",
        ),
        ({"kv_memory": "lots"}, {}, "", "--kv-memory is 'lots', not a size such as 512MiB"),
        (
            {"kv_memory": "1GiB", "kv_blocks": 4},
            {},
            "",
            "--kv-blocks cannot be combined with --kv-memory",
        ),
        (
            {"decode_kv_memory": "1GiB"},
            {"BATON_DECODE_KV_BLOCKS": "4"},
            "",
            "BATON_DECODE_KV_BLOCKS cannot be combined with --decode-kv-memory",
        ),
        ({}, {}, "prefill-kv-memory = 'lots'", "FILE: prefill_kv_memory is 'lots', not a size"),
        ({"prefill_max_num_seqs": 0}, {}, "", "--prefill-max-num-seqs must be at least 1"),
        (
            {"decode_max_num_batched_tokens": -1},
            {},
            "",
            "--decode-max-num-batched-tokens must not be negative",
        ),
        ({}, {}, "decode = ", "FILE is not valid TOML"),
        ({"decode": 1_000_000}, {}, "", "--decode must be at most 1024"),
        ({"prefill_max": 2000}, {}, "", "--prefill-max must be at most 1024"),
        ({"routers": 17}, {}, "", "--routers must be at most 16"),
        ({"decode": 3, "decode_max": 2}, {}, "", "--decode must be at most --decode-max, 2"),
        ({"prefill": 1, "prefill_min": 2}, {}, "", "--prefill must be at least --prefill-min, 2"),
        ({}, {"BATON_METRIC": "a:B"}, "", "BATON_METRIC needs BATON_METRICS_PORT,"),
        ({}, {}, "ssl-keyfile = 'k'", "FILE: ssl_keyfile needs FILE: ssl_certfile too"),
    ],
)
def test_a_wrong_value_is_named_as_whoever_set_it_spells_it(
    tmp_path, flags, environment, content, complaint
):
    path = tmp_path / "serve.toml"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        resolve(flags, environment, str(path))
    assert str(caught.value).replace(str(path), "FILE").startswith(complaint)


def test_a_missing_file_is_a_clear_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        resolve({}, {}, str(tmp_path / "none.toml"))


@pytest.mark.parametrize(
    ("text", "size"),
    [("", 0), ("4096", 4096), ("512MiB", 512 << 20), ("1.5 g", 3 << 29), ("2KB", 2048)],
)
def test_sizes(text, size):
    assert parse_size(text) == size


def test_every_setting_has_help_and_one_heading():
    fields = set(ServeSettings.__struct_fields__)
    assert set(HELP) == fields
    assert sorted(["model", *itertools.chain(*GROUPS.values())]) == sorted(fields)
