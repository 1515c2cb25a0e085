"""Parts of tensors read from files: every type, any slices, into arrays given, and short files."""

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from d3d_jax.errors import D3DError
from d3d_jax.models.safetensors_folder import SafetensorsFolder

KINDS = (np.float32, ml_dtypes.bfloat16, np.float16, np.int32, np.int64)
PARTS = {
    "whole": (slice(0, 6), slice(0, 10)),
    "rows": (slice(2, 5), slice(None)),
    "columns": (slice(None), slice(3, 7)),
    "both": (slice(5, 6), slice(0, 9)),
    "none": (slice(4, 4), slice(0, 2)),
}


@pytest.fixture
def written(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {np.dtype(k).name: rng.integers(-99, 99, (6, 10)).astype(k) for k in KINDS}
    tensors["vector"] = rng.standard_normal(7).astype(np.float32)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path, tensors


@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_what_slicing_the_tensor_gives(part, written):
    folder, tensors = written
    files = SafetensorsFolder(folder)
    assert files.keys() == tensors.keys()
    for key in (np.dtype(kind).name for kind in KINDS):
        expected = tensors[key][PARTS[part]]
        assert files.dtype(key) == expected.dtype and files.shape(key) == (6, 10)
        got = files.read(key, PARTS[part])
        assert got.dtype == expected.dtype and np.array_equal(got, expected)
        files.release()
        for kind in (expected.dtype, np.float64):
            out = np.full((2, *expected.shape), 7, kind)
            assert files.read(key, PARTS[part], out[1]).base is out
            assert np.array_equal(out[1], expected.astype(kind)) and (out[0] == 7).all()
    assert np.array_equal(files.read("vector", (slice(2, 6),)), tensors["vector"][2:6])
    assert np.array_equal(files.read("vector"), tensors["vector"])


def test_a_file_that_shrinks_or_goes_after_it_was_opened_is_named(written):
    folder, tensors = written
    files = SafetensorsFolder(folder)
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    failed = 0
    for key in tensors:
        try:
            files.read(key)
        except D3DError as error:
            failed += 1
            assert f"model.safetensors: tensor {key} cannot be read: the file ends" in str(error)
    assert failed == 1
    path.unlink()
    with pytest.raises(D3DError, match=r"tensor vector cannot be read: .*No such file"):
        files.read("vector")
