"""Files that are written past the page cache hold what ordinary files would."""

import errno
import fcntl
import itertools
import os
import threading

import numpy as np
import pytest
import tensorstore as ts

from burnish.checkpoints import direct_file, orbax_files
from burnish.checkpoints.direct_file import BLOCK, DirectFile
from burnish.checkpoints.errors import CheckpointError
from burnish.checkpoints.ocdbt_file import OcdbtFile, crc32c, stored_bytes
from burnish.checkpoints.orbax_files import ArraySpec, OrbaxReader, OrbaxWriter

MEGABYTE = 1 << 20


def some_bytes(count):
    return np.random.default_rng(count).integers(0, 256, count, np.uint8)


@pytest.fixture(params=["direct", "no direct I/O", "direct I/O that wants other blocks"])
def kind_of_file_system(request, monkeypatch):
    if request.param == "no direct I/O":
        real_open = os.open

        def refusing_open(path, flags, *args, **kwargs):
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return real_open(path, flags, *args, **kwargs)

        monkeypatch.setattr(direct_file.os, "open", refusing_open)
    elif request.param != "direct":
        real_write = direct_file._write_at

        def refusing_write(fd, data, at):
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            real_write(fd, data, at)

        monkeypatch.setattr(direct_file, "_write_at", refusing_write)


def test_writes_at_any_offset_from_any_thread(kind_of_file_system, tmp_path):
    """Neighbours share blocks, some writes are small, and the last ends inside a block."""
    cuts = [0, 8, 1000, MEGABYTE + 3, 6 * MEGABYTE, 6 * MEGABYTE + BLOCK, 9 * MEGABYTE + 4095, 14 * MEGABYTE + 17]
    want = some_bytes(cuts[-1])
    with DirectFile(tmp_path / "file", len(want)) as file:
        threads = [
            threading.Thread(target=file.write, args=(want[start:stop], start))
            for start, stop in itertools.pairwise(cuts)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (tmp_path / "file").read_bytes() == want.tobytes()


def test_an_ocdbt_database_is_one_for_tensorstore(tmp_path):
    values = {f"a{i}/{'x' * (i % 7)}": some_bytes(1 + i * 997) for i in range(300)} | {"big": some_bytes(5 * MEGABYTE)}
    database = OcdbtFile(tmp_path, sum(stored_bytes(len(v)) for v in values.values()))
    for key, value in values.items():
        database.put(key, value)
    database.finish()
    database.close()
    base = f"file://{tmp_path}/"
    store = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
    assert [key.decode() for key in store.list().result()] == sorted(values)
    for key, value in values.items():
        assert store.read(key).result().value == value.tobytes()
    (version,) = ts.ocdbt.dump(ts.KvStore.open(base).result()).result()["versions"]
    statistics = version["root"]["statistics"]
    assert statistics["num_keys"] == len(values)
    assert statistics["num_indirect_value_bytes"] == sum(map(len, values.values()))
    store.write("later", b"more").result()  # it can be written on, too
    assert store.read("big").result().value == values["big"].tobytes()


@pytest.mark.parametrize(("data", "want"), [(b"123456789", 0xE3069283), (bytes(32), 0x8A9136AA)])
def test_checksums_are_castagnoli(data, want):
    """Values from RFC 3720, B.4, and the catalogue of parametrised CRCs."""
    assert crc32c(data) == want


@pytest.mark.parametrize("ocdbt", [True, False])
@pytest.mark.parametrize("zarr3", [True, False])
def test_chunks_are_those_of_zarr(ocdbt, zarr3, tmp_path):
    """Regions of several chunks, cut off where the array ends."""
    array = ArraySpec("a.b", (5, 3, 7), np.dtype(np.float32), (2, 1, 4))
    want = np.random.default_rng(0).normal(size=array.shape).astype(np.float32)
    writer = OrbaxWriter(tmp_path, [array], use_ocdbt=ocdbt, use_zarr3=zarr3)
    writer.write("a.b", (slice(0, 4), 0), want[:4, 0])
    writer.write("a.b", (slice(4, 5), 0), want[4:, 0])
    writer.write("a.b", (slice(None), slice(1, 3), slice(0, 4)), want[:, 1:, :4])
    writer.write("a.b", (slice(None), slice(1, 3), slice(4, 7)), want[:, 1:, 4:])
    with pytest.raises(ValueError, match=r"a\.b"):
        writer.write("a.b", (slice(0, 3), 0), want[:3, 0])
    writer.finish({"a.b": ("a", "b")})
    writer.close()
    reader = OrbaxReader(tmp_path)
    assert reader.array("a.b") == array
    np.testing.assert_array_equal(reader.read("a.b"), want)


def test_an_object_store_gets_what_a_local_directory_gets(tmp_path, monkeypatch):
    """TensorStore's file driver stands for the object store's."""
    array = ArraySpec("a", (3, 5), np.dtype(np.float32), (3, 2))
    values = np.arange(15, dtype=np.float32).reshape(array.shape)

    def written(directory):
        writer = OrbaxWriter(directory, [array], use_ocdbt=False, use_zarr3=True)
        writer.write("a", (), values)
        writer.finish({"a": ("a",)})
        writer.close()
        return {str(f.relative_to(directory)): f.read_bytes() for f in directory.rglob("*") if f.is_file()}

    local = written(tmp_path / "local")
    monkeypatch.setattr(orbax_files, "is_local", lambda path: False)
    monkeypatch.setattr(orbax_files, "_kvstore", lambda path, use_ocdbt: {"driver": "file", "path": f"{path}/"})
    assert written(tmp_path / "remote") == local
    assert "a/c/0/2" in local


def test_a_file_that_cannot_be_reserved_is_refused(tmp_path, monkeypatch):
    def full(fd, start, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(direct_file.os, "posix_fallocate", full)
    with pytest.raises(CheckpointError, match=r"file: 2\.00 GB cannot be reserved"):
        DirectFile(tmp_path / "file", 2 * 10**9)
