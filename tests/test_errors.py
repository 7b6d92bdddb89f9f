"""protocol/errors: an error crosses wires, processes and printed tracebacks as what it was."""

from __future__ import annotations

import pickle
import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataserve.protocol import errors
from dataserve.protocol.errors import CODES, DataserveError, MachineError, UserError, from_code

made = st.builds(
    from_code, st.sampled_from(sorted(CODES)), st.text(), st.text(), st.sampled_from([False, True]).map(bool)
)


@pytest.mark.parametrize("code", CODES)
def test_each_code_has_the_class_of_its_blame(code: str) -> None:
    error = from_code(code, "Text.", "Remedy.", retryable=True)
    assert (error.code, error.text, error.remedy, error.retryable) == (code, "Text.", "Remedy.", True)
    assert (error.blame, str(error)) == (CODES[code], f"Text. Remedy. [{code}]")


def test_a_code_of_a_later_version_keeps_its_name() -> None:
    error = from_code("bad_weather", "Rain.")
    assert (error.code, type(error)) == ("internal", errors.ServerError)
    assert "bad_weather" in str(error)


@given(made)
def test_a_pickle_gives_it_back(error: DataserveError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.args) == (type(error), error.args)


@given(made)
def test_its_own_string_gives_it_back(error: DataserveError) -> None:
    again = type(error)(str(error))
    assert (type(again), again.code, str(again)) == (type(error), error.code, str(error))


def test_a_printed_traceback_gives_it_back_without_the_traceback() -> None:
    try:
        try:
            raise KeyError("first")
        except KeyError:
            raise UserError("bad_option", "x is 3.", "Give 4.") from None
    except UserError as error:
        error.add_note("while it was tried")
        printed = "Caught UserError in DataLoader worker process 7.\nOriginal " + "".join(
            traceback.format_exception(error)
        )
    again = UserError(printed)
    assert (again.code, str(again)) == ("bad_option", "x is 3. Give 4. [bad_option]")
    assert again.__notes__ == ["Caught UserError in DataLoader worker process 7.", "while it was tried"]


def test_a_text_without_a_code_of_its_blame_is_refused() -> None:
    for text in ("", "no code", "another's [stuck]", "unknown [bad_weather]"):
        with pytest.raises(AssertionError, match="ends in no code of user"):
            UserError(text)
    assert MachineError("mine [stuck]").code == "stuck"
