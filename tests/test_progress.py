"""Progress bars: when they show, and that they end."""

import pytest

from nsl_keras import progress


@pytest.fixture(autouse=True)
def _interactive(monkeypatch):
    import keras

    before = keras.config.is_interactive_logging_enabled()
    keras.config.enable_interactive_logging()
    yield
    if not before:
        keras.config.disable_interactive_logging()


@pytest.mark.parametrize(("verbose", "shown"), [(0, ""), (1, "3/3"), (2, "3/3")])
def test_a_bar_over_items(verbose, shown, capsys):
    assert list(progress.Progress(3, verbose).over("abc")) == list("abc")
    text = capsys.readouterr().out
    assert shown in text
    assert bool(text) == (verbose > 0)
    assert text.endswith("\n") == (verbose > 0)


def test_short_work_shows_no_bar_and_long_work_does(capsys, monkeypatch):
    monkeypatch.setattr(progress, "QUIET_SECONDS", 2.0)
    list(progress.Progress(3).over("abc"))
    assert not capsys.readouterr().out
    monkeypatch.setattr(progress, "QUIET_SECONDS", -1.0)
    list(progress.Progress(3).over("abc"))
    assert "3/3" in capsys.readouterr().out


def test_an_unknown_number_of_steps(capsys):
    list(progress.Progress(None, 1).over("abcd"))
    text = capsys.readouterr().out
    assert "4/Unknown" in text and text.endswith("\n")


def test_errors():
    with pytest.raises(ValueError, match="`verbose` must be one of 'auto', 0, 1, 2"):
        progress.Progress(3, "loud")
