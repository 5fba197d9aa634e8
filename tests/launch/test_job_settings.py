"""The defaults of job commands: kept whole, and missed by name."""

import json

import pytest

from burnish.launch.errors import LaunchError
from burnish.launch.settings import KEYS, Settings, load_settings, save_setting, settings_path


@pytest.fixture(autouse=True)
def own_configuration(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def test_nothing_is_set_at_first():
    assert load_settings() == Settings()
    assert (Settings().resolved_backend, Settings().resolved_namespace) == ("gke", "default")


def test_each_value_is_kept_beside_the_others_and_an_empty_one_unsets():
    for key in KEYS:
        save_setting(key, "local" if key == "backend" else f"{key}-1")
    assert load_settings() == Settings("project-1", "cluster-1", "location-1", "namespace-1", "local")
    assert save_setting("cluster", "") == load_settings()
    assert load_settings().cluster is None
    assert "cluster" not in json.loads(settings_path().read_text())
    assert [path.name for path in settings_path().parent.iterdir()] == ["job.json"]


def test_a_missing_value_names_the_command_that_sets_it():
    with pytest.raises(LaunchError, match="burnish job config set cluster VALUE"):
        load_settings().require("cluster")
    assert Settings(cluster="c").require("cluster") == "c"


def test_what_a_command_line_gives_wins():
    save_setting("cluster", "kept")
    assert load_settings().override(cluster="given", project=None).cluster == "given"
    assert load_settings().override(cluster=None).cluster == "kept"


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [("zone", "x", "no such setting"), ("backend", "slurm", "gke or local"), ("project", "a b", "no spaces")],
)
def test_wrong_settings_are_refused_and_change_nothing(key, value, words):
    save_setting("project", "p")
    with pytest.raises(LaunchError, match=words):
        save_setting(key, value)
    assert load_settings() == Settings(project="p")


@pytest.mark.parametrize("content", ["{", "[]", '{"project": 1}', '{"zone": "x"}', "\udcff"])
def test_a_damaged_file_is_named(content):
    settings_path().parent.mkdir(parents=True)
    settings_path().write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(LaunchError, match=r"job\.json: (not JSON|expected an object)"):
        load_settings()
