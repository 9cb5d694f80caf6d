"""The weight cache: what is published can be read, whole or not at all, by whoever pinned it, also on other nodes."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from core.errors import InvariantBroken, OperationFailed, OutOfMemory

torch = pytest.importorskip("torch", reason="the weight cache holds torch tensors")

from backends.ray_gpu.weights import manifest as manifests  # noqa: E402
from backends.ray_gpu.weights import store  # noqa: E402
from backends.ray_gpu.weights.cache import WeightCache  # noqa: E402
from backends.ray_gpu.weights.checksum import Checksum, checksum  # noqa: E402
from backends.ray_gpu.weights.manifest import Manifest  # noqa: E402
from backends.ray_gpu.weights.reader import compare, fingerprint, read  # noqa: E402
from backends.ray_gpu.weights.transfer import Receiver, send  # noqa: E402
from backends.ray_gpu.weights.writer import ALIGNMENT, WeightWriter, bytes_of  # noqa: E402

BUCKET = 4096
fork = multiprocessing.get_context("fork")


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """What models consist of, and what is easy to get wrong: odd sizes, a scalar, nothing, views, several dtypes."""
    draw = torch.Generator().manual_seed(seed)
    table = torch.randn(40, 30, generator=draw)
    return {
        "embed.weight": table,
        "norm.weight": torch.randn(17, generator=draw).to(torch.bfloat16),
        "transposed": table.t(),
        "every other": table[::2, 1::3],
        "half": torch.randn(3, 5, 7, generator=draw).to(torch.float16),
        "flags": torch.tensor([True, False, True]),
        "counts": torch.arange(5),
        "scalar": torch.tensor(3.5),
        "nothing": torch.empty(0, 4),
        "expanded": torch.tensor([1.0, float("nan")]).expand(3, 2),
    }


def publish(directory: Path, version: int, seed: int = 0, pipeline: str = "p1") -> Manifest:
    with WeightWriter(directory, pipeline, version, BUCKET) as writer:
        for name, tensor in tensors(seed).items():
            writer.add(name, tensor)
        return writer.commit()


def spoil(file: str) -> None:
    """Flip one bit in the middle of a file."""
    data = bytearray(Path(file).read_bytes())
    data[len(data) // 2] ^= 1
    Path(file).write_bytes(data)


def in_another_process(target, *arguments) -> None:
    process = fork.Process(target=target, args=arguments)
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# --- writing and reading ----------------------------------------------------------------------------------


def test_what_was_published_is_read_back_bit_by_bit(tmp_path: Path) -> None:
    manifest = publish(tmp_path, 3)
    found = dict(read(manifest))
    assert list(found) == list(tensors()) == list(manifest.names)
    for name, tensor in tensors().items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert bytes_of(found[name]) == bytes_of(tensor)


def test_a_reader_elsewhere_finds_the_same_manifest(tmp_path: Path) -> None:
    manifest = publish(tmp_path, 3)
    assert WeightCache(tmp_path, "p1", keep=2).find(3) == manifest
    assert manifests.decode(manifests.encode(manifest)) == manifest


def test_buckets_are_bounded_and_a_larger_tensor_has_one_for_itself(tmp_path: Path) -> None:
    manifest = publish(tmp_path, 0)
    sizes = {bucket.tensors[0].name: (bucket.nbytes, len(bucket.tensors)) for bucket in manifest.buckets}
    assert sizes["embed.weight"] == (4800, 1)
    assert sizes["transposed"] == (4800, 1)
    assert all(nbytes <= BUCKET for nbytes, count in sizes.values() if count > 1)
    assert max(count for _, count in sizes.values()) >= 6, "small tensors share a bucket"


def test_tensors_are_aligned_and_sizes_are_those_of_the_files(tmp_path: Path) -> None:
    manifest = publish(tmp_path, 0)
    assert all(entry.offset % ALIGNMENT == 0 for bucket in manifest.buckets for entry in bucket.tensors)
    assert all(Path(bucket.file).stat().st_size == bucket.nbytes for bucket in manifest.buckets)
    files = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    assert WeightCache(tmp_path, "p1", keep=2).nbytes == files >= manifest.nbytes


def test_writing_to_a_tensor_that_was_read_does_not_reach_the_cache(tmp_path: Path) -> None:
    manifest = publish(tmp_path, 0)
    dict(read(manifest))["embed.weight"].zero_()
    assert torch.equal(dict(read(manifest))["embed.weight"], tensors()["embed.weight"])


def test_the_memory_of_an_added_tensor_may_be_reused_at_once(tmp_path: Path) -> None:
    buffer = torch.ones(8)
    with WeightWriter(tmp_path, "p1", 0, BUCKET) as writer:
        writer.add("a", buffer)
        writer.add("b", buffer.fill_(2.0))
        manifest = writer.commit()
    assert [tensor[0].item() for _, tensor in read(manifest)] == [1.0, 2.0]


def test_a_name_is_published_once(tmp_path: Path) -> None:
    with WeightWriter(tmp_path, "p1", 0, BUCKET) as writer:
        writer.add("a", torch.ones(1))
        with pytest.raises(InvariantBroken, match="a was added to version 0 twice"):
            writer.add("a", torch.ones(1))


def test_the_checksum_is_the_same_in_one_piece_and_in_many() -> None:
    grown = Checksum()
    for piece in (b"weights", b"", b" and", b" measures"):
        grown.add(piece)
    assert grown.value == checksum(b"weights and measures")
    # The published test vector of XXH3 (64 bits, seed 0) for no input at all.
    assert checksum(b"") == 0x2D06800538D394C2


# --- damage -----------------------------------------------------------------------------------------------


def test_a_damaged_bucket_is_named(tmp_path: Path) -> None:
    manifest = publish(tmp_path, 0)
    spoil(manifest.buckets[1].file)
    with pytest.raises(OperationFailed, match=r"v0/1\.bucket is damaged: its checksum is"):
        list(read(manifest))


def test_a_bucket_cut_short_or_gone_is_named_without_reading_it(tmp_path: Path) -> None:
    manifest = publish(tmp_path, 0)
    os.truncate(manifest.buckets[1].file, 7)
    with pytest.raises(
        OperationFailed, match=rf"1\.bucket has 7 bytes, the manifest says {manifest.buckets[1].nbytes}"
    ):
        list(read(manifest, verify=False))
    os.truncate(manifest.buckets[1].file, 0)
    with pytest.raises(OperationFailed, match="has 0 bytes"):
        list(read(manifest, verify=False))
    Path(manifest.buckets[1].file).unlink()
    with pytest.raises(OperationFailed, match=r"1\.bucket is gone"):
        list(read(manifest, verify=False))


def test_a_damaged_manifest_is_named(tmp_path: Path) -> None:
    publish(tmp_path, 0)
    (tmp_path / "p1/v0/manifest.json").write_text('{"pipeline": "p1"')
    with pytest.raises(OperationFailed, match=r"v0/manifest\.json is damaged"):
        WeightCache(tmp_path, "p1", keep=2).find(0)


def test_a_full_file_system_is_a_host_out_of_memory(tmp_path: Path) -> None:
    with WeightWriter(tmp_path, "p1", 0, 1 << 20) as writer:
        writer.add("small", torch.ones(1))
        writer._open._file.close()
        writer._open._file = open("/dev/full", "wb")  # noqa: SIM115 - the writer closes it
        with pytest.raises(OutOfMemory, match="No space left"):
            writer.add("large", torch.ones(1 << 16))
    assert list(tmp_path.rglob("*.bucket")) == []


# --- comparing --------------------------------------------------------------------------------------------


def test_what_was_loaded_unchanged_compares_equal(tmp_path: Path) -> None:
    compare(publish(tmp_path, 0), {**tensors(), "of no interest": torch.ones(1)})


def test_the_first_tensor_that_differs_is_named(tmp_path: Path) -> None:
    manifest, loaded = publish(tmp_path, 0), tensors()
    loaded["half"] = loaded["half"].clone()
    loaded["half"][0, 1, 2] = 9.0
    loaded["half"][2, 4, 6] = 9.0
    loaded["scalar"] = torch.tensor(0.0)
    with pytest.raises(OperationFailed, match=r"half differs from version 0 of p1: 2 of 105 .* number 9: 9\.0, not"):
        compare(manifest, loaded)


@pytest.mark.parametrize("change", [lambda t: t.to(torch.float64), lambda t: t.reshape(30, 40)], ids=["dtype", "shape"])
def test_another_dtype_or_shape_is_a_difference(tmp_path: Path, change) -> None:
    manifest, loaded = publish(tmp_path, 0), tensors()
    loaded["embed.weight"] = change(loaded["embed.weight"])
    with pytest.raises(OperationFailed, match=r"embed.weight differs .*, not float32 \[40, 30\]"):
        compare(manifest, loaded)


def test_a_tensor_that_was_not_loaded_is_named(tmp_path: Path) -> None:
    loaded = tensors()
    del loaded["counts"]
    with pytest.raises(OperationFailed, match="counts of version 0 of p1 was not loaded"):
        compare(publish(tmp_path, 0), loaded)


def test_fingerprints_tell_tensors_apart(tmp_path: Path) -> None:
    ours, same = fingerprint(publish(tmp_path, 0)), fingerprint(publish(tmp_path, 1))
    other = fingerprint(publish(tmp_path, 2, seed=1))
    assert ours == same
    assert ours["embed.weight"] == checksum(bytes_of(tensors()["embed.weight"]))
    assert {name for name in ours if ours[name] != other[name]} == {
        "embed.weight", "norm.weight", "transposed", "every other", "half",
    }  # fmt: skip


# --- all or nothing ---------------------------------------------------------------------------------------


def half_a_version(directory: str) -> None:
    writer = WeightWriter(directory, "p1", 1, BUCKET)
    for name, tensor in tensors().items():
        writer.add(name, tensor)
    die()


def test_a_killed_writer_leaves_nothing_that_reads_as_a_version(tmp_path: Path) -> None:
    publish(tmp_path, 0)
    in_another_process(half_a_version, str(tmp_path))
    cache = WeightCache(tmp_path, "p1", keep=2)
    assert cache.versions == (0,)
    assert (tmp_path / "p1/v1.part").exists()
    with pytest.raises(OperationFailed, match="version 1 of p1 is not in the weight cache; there: 0"):
        cache.find(1)


def test_the_next_writer_cleans_up_after_a_killed_one(tmp_path: Path) -> None:
    in_another_process(half_a_version, str(tmp_path))
    manifest = publish(tmp_path, 2)
    assert os.listdir(tmp_path / "p1") == ["v2"]
    assert len(dict(read(manifest))) == len(tensors())


def test_a_version_is_written_again_after_its_writer_was_killed(tmp_path: Path) -> None:
    in_another_process(half_a_version, str(tmp_path))
    assert publish(tmp_path, 1).version == WeightCache(tmp_path, "p1", keep=2).latest == 1


def test_an_abandoned_version_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), WeightWriter(tmp_path, "p1", 0, BUCKET) as writer:
        writer.add("a", torch.ones(4))
        raise RuntimeError("the trainer failed")
    assert os.listdir(tmp_path / "p1") == []


def test_a_version_that_is_being_written_is_left_alone_by_other_writers(tmp_path: Path) -> None:
    with WeightWriter(tmp_path, "p1", 1, BUCKET) as writer:
        writer.add("a", torch.ones(4))
        publish(tmp_path, 0)
        with pytest.raises(OperationFailed, match="version 1 of p1 is being written by another process"):
            WeightWriter(tmp_path, "p1", 1, BUCKET)
        writer.commit()
    assert WeightCache(tmp_path, "p1", keep=2).versions == (0, 1)


def test_a_version_published_again_replaces_the_first_one_unless_it_is_read(tmp_path: Path) -> None:
    publish(tmp_path, 1)
    publish(tmp_path, 1, seed=5)
    cache = WeightCache(tmp_path, "p1", keep=2)
    with cache.reading(1) as manifest:
        compare(manifest, tensors(seed=5))
        with pytest.raises(OperationFailed, match="version 1 of p1 is being read, and cannot be published again"):
            publish(tmp_path, 1)
        compare(manifest, tensors(seed=5))
    assert os.listdir(tmp_path / "p1") == ["v1"]


# --- keeping ----------------------------------------------------------------------------------------------


def test_the_latest_version_and_those_being_read_stay(tmp_path: Path) -> None:
    for version in range(4):
        publish(tmp_path, version)
    cache, reader = WeightCache(tmp_path, "p1", keep=3), WeightCache(tmp_path, "p1", keep=3)
    reader.pin(1)
    assert cache.evict() == (0, 2)
    assert (cache.versions, cache.latest) == ((1, 3), 3)
    reader.unpin(1)
    assert cache.evict() == (1,)
    assert cache.evict() == ()


def test_pins_of_one_version_add_up(tmp_path: Path) -> None:
    publish(tmp_path, 0)
    publish(tmp_path, 1)
    cache = WeightCache(tmp_path, "p1", keep=2)
    cache.pin(0)
    cache.pin(0)
    cache.unpin(0)
    assert cache.evict() == ()
    cache.unpin(0)
    assert cache.evict() == (0,)
    with pytest.raises(InvariantBroken, match="version 0 of p1 is not pinned here"):
        cache.unpin(0)
    with pytest.raises(OperationFailed, match="version 0 of p1 is not in the weight cache; there: 1"):
        cache.pin(0)


def pin_and_die(directory: str) -> None:
    cache = WeightCache(directory, "p1", keep=2)
    cache.pin(0)
    if cache.evict() == ():
        die()


def test_the_pins_of_a_killed_reader_end_with_it(tmp_path: Path) -> None:
    publish(tmp_path, 0)
    publish(tmp_path, 1)
    in_another_process(pin_and_die, str(tmp_path))
    assert WeightCache(tmp_path, "p1", keep=2).evict() == (0,)


def test_there_is_no_room_while_too_many_versions_are_being_read(tmp_path: Path) -> None:
    publish(tmp_path, 0)
    cache = WeightCache(tmp_path, "p1", keep=2)
    cache.make_room()
    cache.pin(0)
    publish(tmp_path, 1)
    with pytest.raises(OutOfMemory, match="keeps at most 2 versions, and 0, 1 are all still being read"):
        cache.make_room()
    cache.unpin(0)
    cache.make_room()
    assert cache.versions == (1,)


def test_a_dropped_cache_leaves_nothing_and_what_was_mapped_stays_readable(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path, "p1", keep=2)
    publish(tmp_path, 0, pipeline="p2")
    manifest = publish(tmp_path, 0)
    cache.pin(0)
    mapped = dict(read(manifest))
    cache.drop()
    assert os.listdir(tmp_path) == ["p2"]
    assert (cache.versions, cache.latest, cache.nbytes) == ((), -1, 0)
    assert torch.equal(mapped["embed.weight"], tensors()["embed.weight"])
    publish(tmp_path, 7)
    assert cache.latest == 7


@pytest.mark.parametrize("pipeline", ["../p1", "..", ".", "a/b", "p 1%2F"])
def test_no_pipeline_s_name_leads_out_of_the_directory(tmp_path: Path, pipeline: str) -> None:
    inside = tmp_path / "inside"
    publish(inside, 0, pipeline=pipeline)
    assert WeightCache(inside, pipeline, keep=2).versions == (0,)
    assert os.listdir(tmp_path) == ["inside"]
    assert len(os.listdir(inside)) == 1


# --- to another node --------------------------------------------------------------------------------------


def copy(manifest: Manifest, receiver: Receiver) -> Manifest:
    for index in receiver.missing:
        receiver.receive(index, send(manifest, index))
    return receiver.commit()


def test_a_copy_on_another_node_is_the_same_version_in_its_own_files(tmp_path: Path) -> None:
    manifest = publish(tmp_path / "here", 4)
    there = copy(manifest, Receiver(tmp_path / "there", manifest))
    compare(there, tensors())
    assert WeightCache(tmp_path / "there", "p1", keep=2).find(4) == there
    assert all(bucket.file.startswith(str(tmp_path / "there/p1/v4/")) for bucket in there.buckets)
    assert sorted(os.listdir(tmp_path / "there/p1/v4")) == sorted(os.listdir(tmp_path / "here/p1/v4"))


def test_a_bucket_that_arrives_damaged_is_refused_and_can_be_sent_again(tmp_path: Path) -> None:
    manifest = publish(tmp_path / "here", 4)
    with Receiver(tmp_path / "there", manifest) as receiver:
        good = send(manifest, 0)
        for bad in (good[:-1], bytes(len(good))):
            with pytest.raises(OperationFailed, match="bucket 0 of version 4 of p1 arrived damaged"):
                receiver.receive(0, bad)
        assert 0 in receiver.missing
        with pytest.raises(InvariantBroken, match="have not arrived"):
            receiver.commit()
        compare(copy(manifest, receiver), tensors())


def test_a_damaged_bucket_is_not_sent(tmp_path: Path) -> None:
    manifest = publish(tmp_path, 4)
    spoil(manifest.buckets[2].file)
    with pytest.raises(OperationFailed, match=r"v4/2\.bucket is damaged: checksum"):
        send(manifest, 2)


def receive_one_and_die(directory: str, manifest: Manifest) -> None:
    receiver = Receiver(directory, manifest)
    receiver.receive(0, send(manifest, 0))
    receiver.receive(1, send(manifest, 1))
    die()


def test_after_a_killed_receiver_only_what_is_missing_or_damaged_is_sent(tmp_path: Path) -> None:
    manifest = publish(tmp_path / "here", 4)
    in_another_process(receive_one_and_die, str(tmp_path / "there"), manifest)
    spoil(tmp_path / "there/p1/v4.part/1.bucket")
    assert WeightCache(tmp_path / "there", "p1", keep=2).versions == ()
    receiver = Receiver(tmp_path / "there", manifest)
    assert receiver.missing == tuple(range(1, len(manifest.buckets)))
    compare(copy(manifest, receiver), tensors())


def test_what_a_killed_receiver_left_of_other_contents_is_not_used(tmp_path: Path) -> None:
    first = publish(tmp_path / "here", 4)
    in_another_process(receive_one_and_die, str(tmp_path / "there"), first)
    second = publish(tmp_path / "here", 4, seed=9)
    receiver = Receiver(tmp_path / "there", second)
    assert receiver.missing == tuple(range(len(second.buckets)))
    compare(copy(second, receiver), tensors(seed=9))


def test_one_process_at_a_time_receives_a_version(tmp_path: Path) -> None:
    manifest = publish(tmp_path / "here", 4)
    with (
        Receiver(tmp_path / "there", manifest),
        pytest.raises(OperationFailed, match="version 4 of p1 is being copied by another process"),
    ):
        Receiver(tmp_path / "there", manifest)
    Receiver(tmp_path / "there", manifest).close()


def test_a_lock_on_a_removed_folder_is_no_lock(tmp_path: Path) -> None:
    assert store.lock_folder(tmp_path / "gone", 0) is None
