"""One kill of each kind, of a run of processes."""

import pytest

from benchmarks.kills import campaign

#: Two small trainings of an example, with kills at any of their writes.
SMALL = (
    *("--train_size=64", "--batch_size=16", "--steps=2", "--save_every=1"),
    *("--num_neighbors=30", "--method=plain", "--verbose=0"),
    *("--model_dir={}/models", "--state_dir={}/unfinished", "--output_dir={}"),
)


@pytest.mark.long
def test_a_kill_of_each_kind(tmp_path, monkeypatch):
    monkeypatch.setitem(campaign.EXAMPLES, "image_classification", SMALL)
    whole, random, writes = (
        campaign.Run("image_classification", tmp_path / name)
        for name in ("whole", "random", "writes")
    )
    whole.require_success(whole.end(250))
    expected = whole.content()
    assert len(expected["weights"]) == 1 and any(".keras" in name for name in expected)
    assert campaign.killed_in_each_write(writes, expected, 250, most=3) == 3
    moment = 5.0
    while not campaign.killed_at_a_moment(random, moment, expected, 250):
        moment /= 2


def test_what_differs_is_found(tmp_path):
    run = campaign.Run("demo", tmp_path)
    (tmp_path / "record.json").write_text('{"accuracy": 0.5, "seconds": 3}')
    expected = run.content()
    (tmp_path / "record.json").write_text('{"accuracy": 0.5, "seconds": 4}')
    run.compare(expected)
    (tmp_path / "record.json").write_text('{"accuracy": 0.25, "seconds": 3}')
    with pytest.raises(campaign.SurvivalError, match=r"other content: \['record.json'\]"):
        run.compare(expected)
    (tmp_path / "record.json").write_text('{"accuracy": 0.5, "seconds": 3}')
    (tmp_path / ".scratch-host-1-0").mkdir()
    with pytest.raises(campaign.SurvivalError, match="left behind"):
        run.compare(expected)
    (tmp_path / ".scratch-host-1-0" / "half").write_text("")
    with pytest.raises(campaign.SurvivalError, match="other files"):
        run.compare(expected)
