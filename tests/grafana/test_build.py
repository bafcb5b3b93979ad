"""The committed dashboards are what build.py makes, and keep the rules that dashboard linters know."""

import json
import re
from pathlib import Path

import pytest
import yaml

import grafana
from grafana.build import DASHBOARDS, main, render
from serving.signals import SIGNALS, Kind

FOLDER = Path(grafana.__file__).parent
OTHER_FAMILIES = {"last_sample_timestamp_seconds", "alert_state", "alert_health", "findings"}
UNITS = {"none", "s", "bytes", "percentunit", "reqps", "bool_on_off"}


def committed(name):
    return json.loads((FOLDER / "dashboards" / name).read_text(encoding="utf-8"))


def panels(board):
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def queries(board):
    return [(panel, target) for panel in panels(board) for target in panel["targets"]]


@pytest.fixture(params=sorted(DASHBOARDS))
def board(request):
    return committed(request.param)


@pytest.mark.parametrize("name", sorted(DASHBOARDS))
def test_the_committed_file_is_what_the_generator_writes_to_the_byte(name):
    text = (FOLDER / "dashboards" / name).read_text(encoding="utf-8")
    assert text == render(DASHBOARDS[name]) == render(DASHBOARDS[name])


def test_no_other_dashboard_lies_in_the_folder():
    assert {path.name for path in (FOLDER / "dashboards").iterdir()} == set(DASHBOARDS)


def test_check_notices_an_edited_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("grafana.build.FOLDER", tmp_path)
    assert main(["--check"]) == 1
    assert "run python -m grafana.build" in capsys.readouterr().err
    assert main([]) == 0
    assert main(["--check"]) == 0
    edited = next(tmp_path.iterdir())
    edited.write_text(edited.read_text() + " ")
    assert main(["--check"]) == 1


def test_data_source_job_and_instance_can_be_chosen(board):
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert list(variables) == ["datasource", "job", "instance"]
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["label"] == "Data source"
    for name in ("job", "instance"):
        assert variables[name]["multi"]
        assert variables[name]["allValue"] == ".+"
        assert variables[name]["refresh"] == 2


def test_every_panel_says_what_it_shows_in_which_unit_and_from_where(board):
    assert panels(board)
    for panel in panels(board):
        assert panel["title"]
        assert len(panel["description"]) > 20, panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["targets"], panel["title"]


def test_panels_have_their_own_number_title_and_place(board):
    everything = board["panels"]
    assert [panel["id"] for panel in everything] == list(range(1, len(everything) + 1))
    titles = [panel["title"] for panel in everything]
    assert len(set(titles)) == len(titles)
    taken = set()
    for panel in everything:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_metric_is_chosen_by_job_and_instance_and_is_one_we_export(board):
    for panel, target in queries(board):
        found = re.findall(r"plimsoll_(\w+)(\{[^}]*\})?", target["expr"])
        assert found, panel["title"]
        for name, selector in found:
            assert 'job=~"$job"' in selector, panel["title"]
            assert 'instance=~"$instance"' in selector, panel["title"]
            assert name.removesuffix("_bucket") in set(SIGNALS) | OTHER_FAMILIES, panel["title"]


def test_counters_are_only_read_as_rates_over_the_rate_interval(board):
    counters = [name for name, signal in SIGNALS.items() if signal.kind is not Kind.GAUGE]
    for panel, target in queries(board):
        expr = target["expr"]
        for name in counters:
            assert len(re.findall(rf"plimsoll_{name}\w*\{{", expr)) == len(
                re.findall(rf"rate\(plimsoll_{name}\w*\{{[^}}]*}}\[\$__rate_interval\]", expr)
            ), panel["title"]
        assert set(re.findall(r"\[([^\]]*)\]", expr)) <= {"$__rate_interval"}, panel["title"]


def test_the_board_is_not_editable_and_has_a_stable_address(board):
    assert board["editable"] is False
    assert board["uid"]
    assert "id" not in board


def test_provisioning_files_are_yaml_that_point_at_each_other():
    (source,) = yaml.safe_load((FOLDER / "provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    assert source["type"] == "prometheus"
    (provider,) = yaml.safe_load((FOLDER / "provisioning/dashboards/plimsoll.yaml").read_text())["providers"]
    assert provider["options"]["path"] in (FOLDER / "README.md").read_text()
    scrape = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    assert source["jsonData"]["timeInterval"] == scrape["global"]["scrape_interval"]
    for rules in scrape["rule_files"]:
        assert (FOLDER / rules).is_file()


def test_every_alert_has_a_severity_a_summary_and_a_description():
    rules = yaml.safe_load((FOLDER / "alerts/plimsoll.rules.yml").read_text())
    for rule in rules["groups"][0]["rules"]:
        assert rule["alert"].startswith("Plimsoll")
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert {"summary", "description"} <= set(rule["annotations"])
