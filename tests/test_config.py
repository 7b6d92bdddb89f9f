"""server/config.py and command.py: flags, environment and file become data sets and places; mistakes become sentences."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataserve.protocol.errors import UserError
from dataserve.server import cli, config
from dataserve.server.builders import Manner
from dataserve.server.command import wanted
from dataserve.server.config import OPTIONS, Config
from dataserve.server.spec import DatasetSpec

#: A flag's words and the same in a file, for each row of the table.
SAME: dict[str, tuple[list[str], str, Any]] = {
    "transform": (["--transform", "mine:small"], '"mine:small"', "mine:small"),
    "resize": (["--resize", "32x40"], '"32x40"', "32x40"),
    "crop": (["--crop", "28"], '"28"', "28"),
    "mode": (["--mode", "L"], '"L"', "L"),
    "max_pixels": (["--max-pixels", "1000"], "1000", 1000),
    "truncated": (["--truncated"], "true", True),
    "on_error": (["--on-error", "skip"], '"skip"', "skip"),
    "max_bad": (["--max-bad", "5%"], '"5%"', "5%"),
    "identity": (["--identity", "content"], '"content"', "content"),
    "version": (["--version", "v2"], '"v2"', "v2"),
    "depends": (["--depends", "/a", "--depends", "/b"], '["/a", "/b"]', ("/a", "/b")),
    "allow_random": (["--allow-random"], "true", True),
    "ragged": (["--ragged", "boxes", "--ragged", "areas"], '["boxes", "areas"]', ("boxes", "areas")),
}


def parsed(*words: str) -> argparse.Namespace:
    return cli.parser().parse_args(["prepare", *words])


def read(folder: Path, text: str) -> Config:
    (folder / "data.toml").write_text(text)
    return config.read(str(folder / "data.toml"))


def refusal(folder: Path, text: str) -> UserError:
    with pytest.raises(UserError) as caught:
        read(folder, text)
    assert "data.toml" in caught.value.text
    return caught.value


def test_the_table_has_every_field_of_a_data_set() -> None:
    fields = {field.name for field in dataclasses.fields(DatasetSpec)}
    assert {option.field for option in OPTIONS} | {"name", "source", "args"} == fields
    assert SAME.keys() == {option.field for option in OPTIONS}


@pytest.mark.parametrize("field", SAME)
def test_each_option_is_the_same_as_a_flag_and_as_a_key(isolated: Path, field: str) -> None:
    words, text, value = SAME[field]
    (by_flag,) = wanted(parsed("arrays:/x.npz", *words)).specs
    (by_key,) = read(isolated, f'[[dataset]]\nsource = "arrays:/x.npz"\n{field} = {text}\n').specs
    assert by_flag == by_key
    assert getattr(by_flag, field) == value != getattr(DatasetSpec("x", "arrays:/x.npz"), field)


def test_a_file_of_two_data_sets(isolated: Path) -> None:
    found = read(
        isolated,
        """
        address = "/tmp/elsewhere/d.sock"
        store = "/stores"
        workers = 3
        [[dataset]]
        name = "train"
        source = "torchvision:MNIST"
        args = { root = "/data", train = true, limit = 5, share = 0.5 }
        [[dataset]]
        source = "arrays:/data/Digits.npz"
        """,
    )
    args = {"root": "/data", "train": True, "limit": 5, "share": 0.5}
    assert found == Config(
        (DatasetSpec("train", "torchvision:MNIST", args), DatasetSpec("digits", "arrays:/data/Digits.npz")),
        "ipc:///tmp/elsewhere/d.sock",
        "/stores",
        Manner(3),
    )


def test_relative_paths_in_a_file_are_relative_to_the_file(isolated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (isolated / "elsewhere").mkdir()
    monkeypatch.chdir(isolated / "elsewhere")
    monkeypatch.setenv("HOME", "/home/me")
    found = read(
        isolated,
        """
        store = "stores"
        [[dataset]]
        name = "a"
        source = "torchvision:MNIST"
        args = { root = "../data", split = "not/a/path" }
        depends = ["rows.csv", "~/more"]
        [[dataset]]
        name = "b"
        source = "arrays:x.npz"
        [[dataset]]
        name = "c"
        source = "store:./sealed"
        [[dataset]]
        name = "d"
        source = "store:sealed"
        [[dataset]]
        name = "e"
        source = "mine.data:make"
        """,
    )
    assert found.store == f"{isolated}/stores"
    assert found.specs[0].args == {"root": "/tmp/data", "split": "not/a/path"}
    assert found.specs[0].depends == (f"{isolated}/rows.csv", "/home/me/more")
    sources = [spec.source for spec in found.specs[1:]]
    assert sources == [f"arrays:{isolated}/x.npz", f"store:{isolated}/sealed", "store:sealed", "mine.data:make"]


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("", "bad_config", "There is no data set. Add [[dataset]]"),
        ("dataset = 5", "bad_config", "`dataset` is no list of tables"),
        ("[dataset]\nsource = 'arrays:x'", "bad_config", "Begin each data set with [[dataset]]"),
        ("[[dataset]]", "bad_config", "data set 1 has no source"),
        ("[[dataset]\n", "bad_config", "is no TOML"),
        ("\x00", "bad_config", "is no TOML"),
        ("wokers = 3", "bad_config", "'wokers' in the file is no key. Did you mean 'workers'?"),
        ("[[dataset]]\nsorce = 'arrays:x'", "bad_config", "Did you mean 'source'?"),
        ("[[dataset]]\nsource = 'arrays:x'\nqqq = 1", "bad_config", "Known: name, source, args, transform"),
        ("[[dataset]]\nsource = 5", "bad_config", "source is 5, not text in quotes"),
        ("[[dataset]]\nsource = 'arrays:x'\nargs = 5", "bad_config", "args is 5, not a table"),
        ("[[dataset]]\nsource = 'arrays:x'\nargs = {a = [1]}", "bad_config", "the argument a is list"),
        ("[[dataset]]\nsource = 'arrays:x'\nargs = {a = 2020-01-01}", "bad_config", "the argument a is date"),
        ("[[dataset]]\nsource = 'arrays:x'\ndepends = 'a'", "bad_config", "depends is no list of texts"),
        ("[[dataset]]\nsource = 'arrays:x'\nmax_pixels = true", "bad_config", "max_pixels is True, not an integer"),
        ("[[dataset]]\nsource = 'arrays:x'\nmax_pixels = 0", "bad_config", "max_pixels is 0"),
        ("[[dataset]]\nsource = 'arrays:x'\ntruncated = 1", "bad_config", "truncated is 1, not true or false"),
        ("[[dataset]]\nsource = 'arrays:x'\non_error = 'skp'", "bad_config", "Give one of fail, skip"),
        ("store = ''\n[[dataset]]\nsource = 'arrays:x'", "bad_config", "`store` is an empty text"),
        ("[[dataset]]\nsource = 'arrays:x'\nname = ''", "bad_name", "'' is not allowed"),
        ("[[dataset]]\nsource = 'arrays:x'\nmax_bad = 'many'", "bad_option", "neither N nor P%"),
        ("[[dataset]]\nsource = 'arrays:x'\nname = 'A b'", "bad_name", "'A b' is not allowed"),
        (
            "[[dataset]]\nsource = 'arrays:x'\n[[dataset]]\nsource = 'arrays:x'",
            "bad_config",
            "2 data sets are called 'x'",
        ),
        ("sample_timeout_s = 0\n[[dataset]]\nsource = 'arrays:x'", "bad_config", "Give seconds above 0, 86400 at most"),
        ("sample_timeout_s = true\n[[dataset]]\nsource = 'arrays:x'", "bad_config", "sample_timeout_s is True"),
        ("confirm = 1\n[[dataset]]\nsource = 'arrays:x'", "bad_config", "confirm is 1, not true or false"),
        ("[[dataset]]\nsource = 'arays:/x.npz'", "bad_source", "Did you mean 'arrays:/x.npz'?"),
        ("workers = 0\n[[dataset]]\nsource = 'arrays:x'", "bad_config", "workers is 0"),
        ("address = 'd.sock'\n[[dataset]]\nsource = 'arrays:x'", "bad_address", "is not an absolute path"),
    ],
)
def test_a_mistake_in_a_file_is_a_sentence_with_what_to_do(isolated: Path, text: str, code: str, words: str) -> None:
    error = refusal(isolated, text)
    assert error.code == code
    assert words in str(error)


def test_a_file_that_is_not_there_or_is_no_text(isolated: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        config.read(str(isolated / "none.toml"))
    with pytest.raises(UserError, match="Is a directory"):
        config.read(str(isolated))
    (isolated / "data.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="is no TOML"):
        config.read(str(isolated / "data.toml"))


def test_flags_beat_the_environment_which_beats_the_file_which_beats_defaults() -> None:
    def places(flag: str | None, named: str | None, file: str | None) -> tuple[list[str], str]:
        environ = {"HOME": "/h"} | ({"DATASERVE_ADDRESS": named, "DATASERVE_STORE": named} if named else {})
        return config.addresses(flag, environ, file, 7), str(config.store_root(flag, environ, file))

    assert places("/flag", "/env", "/file") == (["ipc:///flag"], "/flag")
    assert places(None, "/env", "/file") == (["ipc:///env"], "/env")
    assert places(None, None, "/file") == (["ipc:///file"], "/file")
    assert places(None, None, None) == (["ipc:///tmp/dataserve-7/d.sock"], "/h/.cache/dataserve")


def test_workers_of_the_command_line_beat_the_files(isolated: Path) -> None:
    (isolated / "data.toml").write_text("workers = 3\n[[dataset]]\nsource = 'arrays:x'")
    path = str(isolated / "data.toml")
    assert wanted(parsed("--config", path)).manner.workers == 3
    assert wanted(parsed("--config", path, "--workers", "5")).manner.workers == 5


def test_how_long_a_sample_may_take_and_whether_hits_are_confirmed(isolated: Path) -> None:
    (isolated / "data.toml").write_text("sample_timeout_s = 2.5\nconfirm = false\n[[dataset]]\nsource = 'arrays:x'")
    path = str(isolated / "data.toml")
    assert wanted(parsed("--config", path)).manner == Manner(None, 2.5, False)
    assert wanted(parsed("--config", path, "--sample-timeout-s", "9")).manner == Manner(None, 9.0, False)
    assert wanted(parsed("arrays:x")).manner == Manner(None, None, True)
    assert wanted(parsed("arrays:x", "--no-confirm")).manner.confirm is False


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "Either SOURCE or --config"),
        (["arrays:x", "--config", "f"], "Either SOURCE or --config"),
        (["--config", "f", "--resize", "3"], "--resize does not go with --config"),
        (["--config", "f", "--allow-random"], "--allow-random does not go with --config"),
        (["--config", "f", "--arg", "a=1"], "--arg does not go with --config"),
        (["--config", "f", "--name", "a"], "--name does not go with --config"),
        (["arrays:x", "--arg", "train"], "--arg 'train' is not KEY=VALUE"),
        (["arrays:x", "--arg", "=5"], "is not KEY=VALUE"),
        (["arrays:x", "--arg", "a=1", "--arg", "a=2"], "--arg a is given twice"),
    ],
)
def test_a_mistake_on_the_command_line_is_a_sentence(words: list[str], text: str) -> None:
    with pytest.raises(UserError, match=text) as caught:
        wanted(parsed(*words))
    assert caught.value.code == "bad_option"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("false", False),
        ("True", True),
        ("False", False),
        ('"False"', "False"),
        ("12", 12),
        ("-3", -3),
        ("007", "007"),
        ("0.5", 0.5),
        ("1.0e-3", 0.001),
        ("1.2.3", "1.2.3"),
        ("1e5", "1e5"),
        ("nan", "nan"),
        ("", ""),
        ('"2012"', "2012"),
        ('"', '"'),
        ("a=b", "a=b"),
        ("/data/my set", "/data/my set"),
    ],
)
def test_an_arguments_value_is_what_toml_reads_bare_and_else_text(text: str, value: object) -> None:
    found = wanted(parsed("arrays:x", "--arg", f"key={text}")).specs[0].args["key"]
    assert (type(found), found) == (type(value), value)


@given(st.booleans() | st.integers(-(10**17), 10**17) | st.floats(allow_nan=False, allow_infinity=False) | st.text())
def test_any_value_can_be_written(value: str | float | bool) -> None:
    written = {bool: str(value).lower(), str: f'"{value}"'}.get(type(value), repr(value))
    if not isinstance(value, float) or "." in written:
        assert config.scalar(written) == value
