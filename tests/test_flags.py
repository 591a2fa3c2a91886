"""Every setting is a flag with help, and every preset loads."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from absl import flags

from jserve.config import EngineConfig, ModelSettings, SchedulerSettings
from jserve.errors import ConfigError
from jserve.flags import HELP, SECTIONS, config_from_flags, define_flags

ROOT = Path(__file__).parents[1]
PRESETS = sorted(p.stem for p in (ROOT / "configs").glob("*.flags"))


def parsed(*arguments: str, sections: tuple[str, ...] = SECTIONS) -> flags.FlagValues:
    values = flags.FlagValues()
    flags.DEFINE_string("flagfile", "", "absl's own, on the global FLAGS.", flag_values=values)
    define_flags(sections, values)
    values(["program", *arguments])
    return values


def test_every_field_of_every_section_is_a_flag_with_help_and_no_name_is_used_twice():
    fields = {
        section.name: [f.name for f in dataclasses.fields(getattr(EngineConfig(), section.name))]
        for section in dataclasses.fields(EngineConfig)
    }
    assert fields == {section: list(texts) for section, texts in HELP.items()}
    names = [name for names in fields.values() for name in names]
    assert len(names) == len(set(names))
    values = parsed()
    for name in names:
        assert values[name].help.rstrip().endswith(".")


def test_without_arguments_the_flags_say_the_defaults():
    assert config_from_flags(parsed()) == EngineConfig()


def test_a_flag_of_each_type_reaches_its_setting():
    config = config_from_flags(
        parsed("--model=m", "--page_size=16", "--nooverlap", "--drain_timeout_s=1.5")
    )
    assert config.model.model == "m"
    assert config.cache.page_size == 16
    assert config.scheduler.overlap is False
    assert config.server.drain_timeout_s == 1.5


def test_false_can_be_written_out():
    assert not config_from_flags(parsed("--overlap=false")).scheduler.overlap


def test_sections_without_flags_keep_their_defaults():
    values = parsed("--max_num_seqs=2", sections=("scheduler",))
    assert "port" not in values
    assert config_from_flags(values) == EngineConfig(scheduler=SchedulerSettings(max_num_seqs=2))


def test_defining_the_flags_twice_changes_nothing():
    values = parsed("--model=m")
    define_flags(flag_values=values)
    assert config_from_flags(values) == EngineConfig(model=ModelSettings(model="m"))


@pytest.mark.parametrize("argument", ["--port=-1", "--port=x", "--drain_timeout_s=-1", "--bogus=1"])
def test_values_that_no_setting_can_have_are_refused_by_name(argument):
    name = argument.strip("-").split("=")[0]
    with pytest.raises(flags.Error, match=name):
        parsed(argument)


def test_contradictions_are_a_config_error():
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        config_from_flags(parsed("--max_num_seqs=64", "--max_num_batched_tokens=32"))


def test_the_presets_are_those_that_the_issue_names():
    assert {
        "batch_documents",
        "cpu_default",
        "gpu_h200",
        "interactive_chat",
        "tpu_v5e",
        "tpu_v6e",
    } <= set(PRESETS)


@pytest.mark.parametrize("preset", PRESETS)
def test_each_preset_loads_and_each_of_its_lines_departs_from_the_default(preset):
    path = ROOT / "configs" / f"{preset}.flags"
    config = config_from_flags(parsed(f"--flagfile={path}"))
    departures = {
        field.name
        for section in SECTIONS
        for field in dataclasses.fields(getattr(config, section))
        if getattr(getattr(config, section), field.name) != field.default
    }
    lines = [line.strip() for line in path.read_text().splitlines()]
    written = [line[2:].split("=")[0] for line in lines if line.startswith("--")]
    assert sorted(written) == sorted(departures)


@pytest.mark.parametrize("preset", PRESETS)
def test_each_departure_of_a_preset_stands_under_a_comment(preset):
    for paragraph in (ROOT / "configs" / f"{preset}.flags").read_text().strip().split("\n\n"):
        assert paragraph.startswith("# ")


@pytest.mark.parametrize("preset", [p for p in PRESETS if p != "interactive_chat"])
def test_presets_that_are_not_for_chat_serve_offline_jobs_too(preset):
    engine_only = tuple(section for section in SECTIONS if section != "server")
    parsed(f"--flagfile={ROOT / 'configs' / preset}.flags", sections=engine_only)


def test_a_later_argument_wins_over_a_preset():
    path = ROOT / "configs" / "interactive_chat.flags"
    config = config_from_flags(parsed(f"--flagfile={path}", "--prefill_chunk=64"))
    assert config.scheduler.prefill_chunk == 64
