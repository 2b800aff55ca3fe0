"""Segments can be read any number of times until the lease ends; then they are removed."""

import gc
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import tracemalloc
from pathlib import Path

import msgspec
import numpy as np
import pytest

from baton.proto import DecodeFailed, LimitExceeded, msgpack_numpy_decoder, msgpack_numpy_encoder
from baton.proto.codec import shared_memory
from baton.proto.codec.shared_memory import SegmentStore, sweep_dead_owners

pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no shared memory here")

ARRAY = np.arange(5000, dtype=np.float32).reshape(50, 100)
decode, view = msgpack_numpy_decoder(np.ndarray), msgpack_numpy_decoder(np.ndarray, copy=False)


@pytest.fixture
def store(monkeypatch):
    made = SegmentStore()
    monkeypatch.setattr(shared_memory, "_store", made)
    yield made
    made.close()
    assert segments(made) == []


def segments(store):
    return sorted(path.name for path in Path("/dev/shm").glob(f"baton-arrays-{store._token}*"))


def encode(array, threshold=1000):
    return msgpack_numpy_encoder(use_shared_memory=True, shared_memory_threshold=threshold)(array)


def named(name, shape=(50, 100), dtype="<f4"):
    return msgspec.msgpack.encode({"__shm__": True, "name": name, "shape": shape, "dtype": dtype})


def test_the_form_on_the_wire_and_the_threshold(store):
    raw = msgspec.msgpack.decode(encode(ARRAY))
    assert raw == {"__shm__": True, "name": raw["name"], "shape": [50, 100], "dtype": "<f4"}
    assert msgspec.msgpack.decode(encode(ARRAY, ARRAY.nbytes))["__shm__"]
    assert msgspec.msgpack.decode(encode(ARRAY, ARRAY.nbytes + 1))["__np__"]
    assert msgspec.msgpack.decode(encode(ARRAY[:0], 0))["__np__"]
    assert msgspec.msgpack.decode(msgpack_numpy_encoder()(ARRAY))["__np__"]


def test_decoding_is_idempotent_and_copies_on_request(store):
    message = encode(np.asfortranarray(ARRAY))
    for _ in range(3):
        copied, seen = decode(message), view(message)
        assert np.array_equal(copied, ARRAY)
        assert np.array_equal(seen, ARRAY)
        assert (copied.flags.writeable, seen.flags.writeable) == (True, False)
    copied[:] = 0
    assert np.array_equal(decode(message), ARRAY)


def test_behind_the_lease_it_is_gone_but_what_was_mapped_stays(store):
    message = encode(ARRAY)
    seen = view(message)
    store._leases = dict.fromkeys(store._leases, 0.0)
    store.expire()
    with pytest.raises(DecodeFailed, match="cannot be opened"):
        decode(message)
    gc.collect()
    assert np.array_equal(seen, ARRAY)


def test_an_unread_message_is_swept_by_the_next_one(store):
    encode(ARRAY)
    (owner, old) = sorted(segments(store), key=len)
    store._leases = dict.fromkeys(store._leases, 0.0)
    encode(ARRAY)
    assert old not in segments(store)
    assert len(segments(store)) == 2
    assert owner.endswith(".owner")


def test_an_unread_message_is_swept_by_the_timer():
    store = SegmentStore(lease_s=0.0)
    store.put(ARRAY)
    while store._timer is not None:
        store._timer.join()
    assert len(segments(store)) == 1
    store.close()


def test_without_room_the_array_travels_inside(store, monkeypatch):
    class Full:
        f_bavail, f_frsize = 1, ARRAY.nbytes

    monkeypatch.setattr(os, "statvfs", lambda path: Full)
    assert msgspec.msgpack.decode(encode(ARRAY))["__np__"]

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.undo()
    monkeypatch.setattr(shared_memory, "_store", store)
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    assert msgspec.msgpack.decode(encode(ARRAY))["__np__"]
    assert len(segments(store)) == 1


def run(code):
    """Run a process that shares arrays, and return its output."""
    code = "import numpy as np\nfrom baton.proto import *\n" + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    return done.returncode, done.stdout, done.stderr


def test_a_reader_that_ends_takes_nothing_away(store, tmp_path):
    """A tracker of shared memory would unlink the segment that the reader attached."""
    message = encode(ARRAY)
    (tmp_path / "message").write_bytes(message)
    code, out, err = run(f"""
        data = open({str(tmp_path / "message")!r}, "rb").read()
        arrays = [msgpack_numpy_decoder(np.ndarray, copy=c)(data) for c in (True, False)]
        print(sum(float(a.sum()) for a in arrays))
    """)
    assert (code, err) == (0, b"")
    assert float(out) == 2 * ARRAY.sum()
    assert np.array_equal(decode(message), ARRAY)


def test_an_owner_that_ends_takes_its_segments_along():
    code, out, err = run("""
        import msgspec
        message = msgpack_numpy_encoder(True, 1000)(np.ones(1000))
        print(msgspec.msgpack.decode(message)["name"])
    """)
    assert (code, err) == (0, b"")
    assert not (Path("/dev/shm") / out.decode().strip()).exists()


def test_a_killed_owner_is_swept_and_a_living_one_is_not(tmp_path):
    """In a separate folder, because every process that starts sharing sweeps the folder."""
    alive = SegmentStore(tmp_path)
    kept = alive.put(ARRAY)
    code, out, _ = run(f"""
        import os, pathlib, signal
        from baton.proto.codec.shared_memory import SegmentStore
        store = SegmentStore(pathlib.Path({str(tmp_path)!r}))
        print(store.put(np.ones(1000)), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    assert code == -signal.SIGKILL
    assert (tmp_path / out.decode().strip()).stat().st_size == 8000
    assert sweep_dead_owners(tmp_path) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [kept, f"baton-arrays-{alive._token}.owner"]
    )
    SegmentStore(tmp_path).close()
    assert (tmp_path / kept).exists()
    alive.close()
    assert list(tmp_path.iterdir()) == []


def test_a_child_leaves_its_parents_segments_alone(store):
    message = encode(ARRAY)
    child = os.fork()
    if not child:
        store.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert np.array_equal(decode(message), ARRAY)


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (named("../etc/passwd"), DecodeFailed),
        (named("a/b"), DecodeFailed),
        (named(""), DecodeFailed),
        (named("x" * 300), DecodeFailed),
        (named("baton-arrays-nothing"), DecodeFailed),
        (named("..", (1,), "|u1"), DecodeFailed),
        (named("x", (1 << 40,)), LimitExceeded),
        (named("x", dtype="|O"), DecodeFailed),
        (msgspec.msgpack.encode({"__shm__": True, "__np__": True, "name": "x"}), DecodeFailed),
    ],
)
def test_names_and_sizes_are_checked(message, error):
    with pytest.raises(error):
        decode(message)


@pytest.fixture
def planted():
    """Make a file in shared memory, as any process of this user can."""
    made = []

    def plant(name, size=20_000, mode=0o600):
        path = Path("/dev/shm") / name
        made.append(path)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
        os.posix_fallocate(file, 0, size)
        os.close(file)
        return path

    yield plant
    for path in made:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("owned", [True, False])
def test_a_file_that_no_encoder_made_is_refused(store, planted, owned, copy):
    owner, random = store._token if owned else "f" * 16, "0123456789abcdef"
    names = [
        f"somebody-{random}",
        f"baton-arrays-{owner}-{random}",
        f"baton-arrays-{owner}-{random}-{random}",
    ]
    for name in names:
        planted(name)
        with pytest.raises(DecodeFailed):
            msgpack_numpy_decoder(np.ndarray, copy=copy)(named(name))


def test_threshold_zero_puts_every_array_with_content_into_shared_memory(store):
    message = encode(ARRAY[:1, :1], 0)
    assert msgspec.msgpack.decode(message)["__shm__"]
    assert np.array_equal(decode(message), ARRAY[:1, :1])


def test_a_name_is_good_for_its_own_size_and_owner_alone(store):
    name = msgspec.msgpack.decode(encode(ARRAY))["name"]
    for shape in ((50, 99), (50, 101)):
        with pytest.raises(DecodeFailed, match="no encoder"):
            decode(named(name, shape))
    other = SegmentStore()
    with pytest.raises(DecodeFailed, match="no encoder"):
        decode(named(name.replace(store._token, other._token)))
    other.close()
    assert np.array_equal(decode(named("/" + name)), ARRAY)


@pytest.mark.parametrize("change", ["mode", "size", "sparse", "link", "pipe", "owner's mode"])
def test_a_segment_that_somebody_changed_is_refused(store, change):
    name = msgspec.msgpack.decode(encode(ARRAY))["name"]
    path = Path("/dev/shm") / name
    owner = Path("/dev/shm") / f"baton-arrays-{store._token}.owner"
    if change == "mode":
        path.chmod(0o640)
    elif change == "owner's mode":
        owner.chmod(0o644)
    elif change in ("size", "sparse"):
        os.truncate(path, 0)
        os.truncate(path, ARRAY.nbytes if change == "sparse" else ARRAY.nbytes - 1)
    else:
        path.unlink()
        path.symlink_to("/etc/hostname") if change == "link" else os.mkfifo(path)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for codec in (decode, view):
        with pytest.raises(DecodeFailed):
            codec(named(name))
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_small_message_cannot_take_much_memory(store, monkeypatch):
    """Neither by the size of an array nor by repeated references to one array."""
    tracemalloc.start()
    for codec in (decode, view):
        with pytest.raises(LimitExceeded, match="shared memory"):
            codec(named(f"baton-arrays-{store._token}-{'0' * 16}-{'0' * 16}", (1 << 28,)))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    monkeypatch.setattr(shared_memory, "MAX_SHARED_BYTES", 3 * ARRAY.nbytes)
    one = msgspec.msgpack.decode(encode(ARRAY))
    arrays = msgpack_numpy_decoder(list[np.ndarray])
    for _ in range(2):  # every message has the whole limit
        assert len(arrays(msgspec.msgpack.encode([one] * 3))) == 3
        with pytest.raises(LimitExceeded, match="shared memory"):
            arrays(msgspec.msgpack.encode([one] * 4))


def test_an_encoder_puts_no_more_there_than_a_decoder_takes(store, monkeypatch):
    monkeypatch.setattr(shared_memory, "MAX_SHARED_BYTES", 2 * ARRAY.nbytes)
    for _ in range(2):
        message = encode([ARRAY, ARRAY, ARRAY])
        forms = [sorted(item)[0] for item in msgspec.msgpack.decode(message)]
        assert forms == ["__shm__", "__shm__", "__np__"]
        for array in msgpack_numpy_decoder(list[np.ndarray])(message):
            assert np.array_equal(array, ARRAY)


def test_shared_memory_can_be_refused(store, monkeypatch):
    message = encode(ARRAY)
    refusing = msgpack_numpy_decoder(np.ndarray, use_shared_memory=False)
    for codec in (refusing, pickle.loads(pickle.dumps(refusing))):
        with pytest.raises(DecodeFailed, match="refused"):
            codec(message)
    assert np.array_equal(refusing(msgpack_numpy_encoder()(ARRAY)), ARRAY)


@pytest.mark.parametrize("value", ["off", "0", "no", "of"])
def test_an_operator_refuses_shared_memory_for_a_whole_process(store, monkeypatch, value):
    message = encode(ARRAY)
    monkeypatch.setenv("BATON_SHARED_ARRAYS", value)
    with pytest.raises(DecodeFailed, match="BATON_SHARED_ARRAYS"):
        decode(message)
    assert msgspec.msgpack.decode(encode(ARRAY))["__np__"]
    for value in ("", "on"):
        monkeypatch.setenv("BATON_SHARED_ARRAYS", value)
        assert np.array_equal(decode(message), ARRAY)


def test_a_name_of_another_cluster_is_refused(store, monkeypatch):
    monkeypatch.setenv("BATON_SHARED_ARRAYS_KEY", "one cluster \udcff")  # any bytes
    message = encode(ARRAY)
    assert np.array_equal(decode(message), ARRAY)
    for key in ("another", ""):
        monkeypatch.setenv("BATON_SHARED_ARRAYS_KEY", key)
        with pytest.raises(DecodeFailed, match="no encoder"):
            decode(message)


def test_encoders_and_decoders_pickle_with_their_parameters(store):
    encoder = pickle.loads(pickle.dumps(msgpack_numpy_encoder(True, 7)))
    assert (encoder._use_shared_memory, encoder._shared_memory_threshold) == (True, 7)
    assert np.array_equal(pickle.loads(pickle.dumps(decode))(encoder(ARRAY)), ARRAY)
