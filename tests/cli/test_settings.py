import pytest

from baton.cli.settings import HELP, resolve
from baton.deploy.config import ServeSettings, parse_size
from baton.proto.errors import ConfigError


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "serve.toml"
    path.write_text('prefill = 3\ndecode = 4\nkv-memory = "64MiB"\n')
    return str(path)


def test_defaults_alone():
    assert resolve({}, {}, None) == ServeSettings()


def test_flag_beats_environment_beats_file_beats_default(file):
    settings = resolve({"prefill": 7, "decode": None}, {"BATON_DECODE": "5", "HOME": "/"}, file)
    assert (settings.prefill, settings.decode, settings.kv_memory) == (7, 5, "64MiB")
    assert settings.block_size == ServeSettings().block_size


@pytest.mark.parametrize(
    ("flags", "environment", "content", "complaint"),
    [
        ({}, {"BATON_DECODE": "many"}, "", "environment.*decode"),
        ({}, {}, "decod = 2", "file.*decod"),
        ({}, {}, "decode = 'x'", "file.*decode"),
        ({}, {}, "decode = ", "not valid TOML"),
        ({"decode": 0}, {}, "", "decode must be at least 1"),
        ({"grace": -1.0}, {}, "", "grace must not be negative"),
        ({"transport": "carrier pigeon"}, {}, "", "transport must be one of ipc, tcp"),
        ({"backend": "abacus"}, {}, "", "backend must be one of"),
        ({"kv_memory": "lots"}, {}, "", "not a size"),
        ({"kv_memory": "1GiB", "kv_blocks": 4}, {}, "", "kv_blocks excludes kv_memory"),
        (
            {"decode_kv_memory": "1GiB"},
            {"BATON_DECODE_KV_BLOCKS": "4"},
            "",
            "decode_kv_blocks excludes decode_kv_memory",
        ),
        ({}, {}, "prefill-kv-memory = 'lots'", "prefill_kv_memory 'lots' is not a size"),
        ({"prefill_max_batch": 0}, {}, "", "prefill_max_batch must be at least 1"),
        ({"decode_chunk_budget": -1}, {}, "", "decode_chunk_budget must not be negative"),
        ({}, {}, "decod = 2", "no setting 'decod'; did you mean decode"),
        ({}, {}, "[zzz]\nx = 1", "no setting 'zzz'; baton serve --help lists them"),
        ({}, {}, "decode = 'two'", "file.*: decode is 'two': Expected `int`"),
        ({"decode": 1_000_000}, {}, "", "decode must be at most 1024"),
        ({"prefill_max": 2000}, {}, "", "prefill_max must be at most 1024"),
        ({"routers": 17}, {}, "", "routers must be at most 16"),
        ({"decode": 3, "decode_max": 2}, {}, "", "decode must be at most decode_max, 2"),
        ({"prefill": 1, "prefill_min": 2}, {}, "", "prefill must be at least prefill_min, 2"),
    ],
)
def test_a_wrong_value_is_named_with_its_source(tmp_path, flags, environment, content, complaint):
    path = tmp_path / "serve.toml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=complaint):
        resolve(flags, environment, str(path))


def test_a_missing_file_is_a_clear_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        resolve({}, {}, str(tmp_path / "none.toml"))


@pytest.mark.parametrize(
    ("text", "size"),
    [("", 0), ("4096", 4096), ("512MiB", 512 << 20), ("1.5 g", 3 << 29), ("2KB", 2048)],
)
def test_sizes(text, size):
    assert parse_size(text) == size


def test_every_setting_has_help():
    assert set(HELP) == set(ServeSettings.__struct_fields__)
