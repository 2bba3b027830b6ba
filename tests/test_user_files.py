"""Modules of a user's files, as the commands load them."""

import sys

import pytest

from shardlib._user_files import load_module


@pytest.fixture(autouse=True)
def modules_as_before(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def package(folder, name, text):
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / name).write_text(text)
    return str(folder / name)


def test_user_files_with_dots_in_their_names_are_loaded_from_a_package(tmp_path):
    assert load_module(package(tmp_path / "configs", "llama3.1.py", "x = 1")).x == 1


def test_user_files_in_whose_place_another_is_imported_are_refused(tmp_path):
    assert load_module(package(tmp_path / "a/of_user", "one.py", "x = 1")).x == 1
    other = package(tmp_path / "b/of_user", "one.py", "x = 2")
    with pytest.raises(ValueError, match="is `of_user.one` of its package, and so is .*rename"):
        load_module(other)


def test_user_files_are_no_folders(tmp_path):
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(ValueError, match="There is no file"):
        load_module(str(tmp_path / "folder.py"))
