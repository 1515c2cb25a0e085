"""Files that appear whole or not at all."""

import pytest

from d3d_jax.errors import D3DError
from d3d_jax.files import picture, replacing, write_json, write_text


def test_a_file_is_replaced_only_by_a_whole_one(tmp_path):
    file = tmp_path / "a.json"
    write_json(file, {"ü": [1]}, indent=None)
    assert file.read_text(encoding="utf-8") == '{"ü": [1]}\n'
    with pytest.raises(KeyboardInterrupt), replacing(file) as partial:
        assert partial.parent == tmp_path and partial.suffix == ".json"
        partial.write_text("half of")
        raise KeyboardInterrupt
    assert file.read_text(encoding="utf-8") == '{"ü": [1]}\n'
    write_text(file, "new")
    assert file.read_text() == "new" and list(tmp_path.iterdir()) == [file]


def test_what_cannot_be_written_is_named(tmp_path):
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "nonesuch/a.txt", tmp_path / "folder"):
        with pytest.raises(D3DError, match=f"cannot write {path}: "):
            write_text(path, "text")
    with pytest.raises(D3DError, match="cannot write"), picture(tmp_path / "nonesuch/a.png"):
        pass
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]
